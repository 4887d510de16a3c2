"""Prompts of a benchmark: random tokens, or a file of real prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chorale.errors import ConfigError
from chorale.harmony.vocab import NUM_RANKS, Vocabulary
from chorale.measure.bench.load import LoadRequest

CHAT_ENDPOINT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class LoadPrompt:
    """A prompt as text or, for endpoints that accept them, as token ids."""

    content: str | list[int]
    num_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Prompt and output lengths, uniform within ``ratio`` of the mean, as in vLLM's random dataset."""

    input: int = 1024
    output: int = 128
    ratio: float = 0.0

    def draw(self, generator: random.Random) -> tuple[int, int]:
        return self._around(self.input, generator), self._around(self.output, generator)

    def _around(self, mean: int, generator: random.Random) -> int:
        return max(1, generator.randint(int(mean * (1 - self.ratio)), int(mean * (1 + self.ratio))))


def random_prompts(
    count: int, lengths: RandomLengths, seed: int, *, as_text: Vocabulary | None = None, prefix: int = 0
) -> Iterator[LoadPrompt]:
    """Yields prompts of random ordinary tokens that share only their first ``prefix`` tokens.

    ``as_text``: decode them with this vocabulary. Token counts are then approximate.
    """
    generator = random.Random(seed)
    common = [generator.randrange(NUM_RANKS) for _ in range(prefix)]
    for _ in range(count):
        length, output = lengths.draw(generator)
        ids = common + [generator.randrange(NUM_RANKS) for _ in range(length)]
        yield LoadPrompt(ids if as_text is None else as_text.decode(ids), len(ids), output)


def file_prompts(path: Path, kind: str, vocab: Vocabulary, output_tokens: int | None) -> list[LoadPrompt]:
    """Reads prompts. ``custom``: JSON lines with "prompt" (and "output_tokens"). ``sharegpt``: its JSON file.

    Raises ``ConfigError`` if the file is not of that kind.
    """
    try:
        pairs = list(_sharegpt(path) if kind == "sharegpt" else _lines(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--dataset-path {path}: is not a {kind} file ({error})") from error
    if not pairs:
        raise ConfigError(f"--dataset-path {path}: contains no prompts")
    return [
        LoadPrompt(text, len(vocab.encode(text)), output_tokens or length or len(vocab.encode(answer)) or 128)
        for text, answer, length in pairs
    ]


def _lines(path: Path) -> Iterator[tuple[str, str, int]]:
    # Split only at line feeds: JSON strings may contain other line separators (U+2028) unescaped.
    for line in path.read_text("utf-8").split("\n"):
        if line.strip():
            entry = json.loads(line)
            yield str(entry["prompt"]), "", int(entry.get("output_tokens") or 0)


def _sharegpt(path: Path) -> Iterator[tuple[str, str, int]]:
    for entry in json.loads(path.read_text("utf-8")):
        turns = entry["conversations"]
        if len(turns) >= 2:
            yield str(turns[0]["value"]), str(turns[1]["value"]), 0


def request_for(
    prompt: LoadPrompt, *, endpoint: str, model: str, ignore_eos: bool, extra: dict[str, Any]
) -> LoadRequest:
    """Returns the streamed request for one prompt."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if endpoint.rstrip("/").endswith("/chat/completions"):
        body["messages"] = [{"role": "user", "content": prompt.content}]
        body["max_completion_tokens"] = prompt.output_tokens
    else:
        body |= {"prompt": prompt.content, "max_tokens": prompt.output_tokens}
    if ignore_eos:
        body["ignore_eos"] = True
    return LoadRequest(json.dumps(body | extra), prompt.num_tokens)
