"""``chorale verify RECORD``: repeats a recorded answer on a server or here, and compares tokens and
log-probabilities bit by bit.

Exit codes: 0 equal; 1 different; 2 the record cannot be compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from chorale.cli.commands.client.chat import connected
from chorale.config.options.parser import Parser
from chorale.errors import ConfigError
from chorale.requests.openai_client import Client
from chorale.turns.record import LEAST

_Ids = Annotated[list[int], msgspec.Meta(min_length=1)]
Tokens = tuple[list[int], list[float]]  # token ids and their log-probabilities
Generate = Callable[[list[int], dict[str, Any]], Tokens]  # prompt, vLLM's sampling parameters
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "min_tokens", "ignore_eos", "stop_token_ids", "seed", "logprobs",
)  # fmt: skip
# What nothing repeats -> what it is called.
_OTHERS = {
    "grammar": "a grammar (structured output, forced tool calls or a thinking budget)",
    "bad_words": "bad_words",
}


class ModelFacts(msgspec.Struct):
    name: str
    hash: str


class RecordedRound(msgspec.Struct):
    prompt_token_ids: _Ids
    sampling: dict[str, Any]
    output_token_ids: list[int]
    logprobs: list[float]
    choice: int = 0


class Record(msgspec.Struct):
    """The fields of a record that a comparison needs (``chorale/api/record.py``)."""

    model: ModelFacts
    kernels: dict[str, Any]
    rounds: list[RecordedRound]


def parser() -> Parser:
    options = Parser(
        "chorale verify",
        usage="chorale verify RECORD [MODEL] [options]",
        description="Repeat a recorded answer, and compare its tokens and log-probabilities bit by bit. "
        "Without --server and MODEL, the record's model is loaded here.",
    )
    options.add_argument("record", help="a file with a record, or with an answer that has one; - for stdin")
    options.add_argument("model", nargs="?", help="model to load here: folder, hub id or demo")
    options.add_argument("--server", dest="url", help="server, for example http://localhost:8000/v1")
    options.add_argument("--api-key", help="API key (prefer CHORALE_API_KEY)")
    options.add_argument("--model-name", help="model name at that server")
    return options


def run(arguments: list[str]) -> int:
    given = parser().read(arguments)
    if given.url is not None and given.model is not None:
        raise ConfigError("MODEL and --server: choose one")
    record = read_record(sys.stdin.read() if given.record == "-" else Path(given.record).read_text())
    for each in record.rounds:
        for name, what in _OTHERS.items():
            if each.sampling.get(name):
                raise ConfigError(f"cannot be compared: the answer was constrained by {what}")
    if given.url is None:
        return _verify_here(record, given.model or record.model.name)
    with connected(given) as (client, model):
        return _compare(record, *_server(client, model))


def read_record(text: str) -> Record:
    """Returns the record in a JSON text: itself, or the ``record`` of an answer. Raises ``ConfigError``."""
    try:
        found = json.loads(text)
        found = found.get("record", found) if isinstance(found, dict) else found
        return msgspec.convert(found, Record)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a record of include_record: {error}") from None


def _verify_here(record: Record, model: str) -> int:
    from chorale.llm import LLM, SamplingParams

    kernels = {"batch_invariant": bool(record.kernels.get("batch_invariant"))}
    names = ("dtype", "kv_cache_dtype", "logprobs_mode")
    kernels |= {name: record.kernels[name] for name in names if name in record.kernels}
    with LLM(model, **kernels) as llm:  # type: ignore[arg-type]

        def generate(prompt: list[int], sampling: dict[str, Any]) -> Tokens:
            bias = {int(token): value for token, value in (sampling.pop("logit_bias", None) or {}).items()}
            params = SamplingParams(**sampling, logit_bias=bias or None, detokenize=False)
            answer = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
            scores = zip(answer.token_ids, answer.logprobs or (), strict=False)
            return answer.token_ids, [max(each[token].logprob, LEAST) for token, each in scores if each]

        info = llm.info
        own = {name: getattr(info, name) for name in ("ops", "device", *names, "batch_invariant")}
        return _compare(record, info.model_hash, own, generate)


def _server(client: Client, model: str) -> tuple[str, dict[str, Any], Generate]:
    """Returns hash and kernels of the server's model, and a function that generates there."""
    body = {"model": model, "prompt": [1], "max_tokens": 1, "include_record": True}
    events = list(client.stream("completions", body))
    record = next((event["record"] for event in reversed(events) if "record" in event), None)
    if record is None:
        raise ConfigError("cannot be compared: the server gives no records")

    def generate(prompt: list[int], sampling: dict[str, Any]) -> Tokens:
        found: Tokens = ([], [])
        asked = {"model": model, "token_ids": prompt, "sampling_params": sampling}
        for event in client.stream("/inference/v1/generate", asked):
            for choice in event.get("choices", ()):
                found[0].extend(choice["token_ids"])
                found[1].extend(each["logprob"] for each in (choice["logprobs"] or {}).get("content", ()))
        return found

    return record["model"]["hash"], record["kernels"], generate


def _compare(record: Record, model_hash: str, kernels: dict[str, Any], generate: Generate) -> int:
    if model_hash != record.model.hash:
        print(f"cannot be compared: the model has hash {model_hash}, that of the record {record.model.hash}")
        return 2
    for number, each in enumerate(record.rounds):
        if not each.output_token_ids:
            continue
        asked = {name: each.sampling[name] for name in _SAMPLING if name in each.sampling}
        asked |= {"max_tokens": len(each.output_token_ids), "logprobs": asked.get("logprobs") or 0}
        difference = first_difference(each, generate(each.prompt_token_ids, asked))
        if difference:
            print(f"different: round {number} (choice {each.choice}), {difference}")
            others = [name for name, value in kernels.items() if record.kernels.get(name, value) != value]
            if others:
                changes = [f"{name} {record.kernels[name]} -> {kernels[name]}" for name in others]
                print(f"the record was made with other kernels: {', '.join(changes)}")
            return 1
    print("equal")
    return 0


def first_difference(recorded: RecordedRound, found: Tokens) -> str:
    """Returns the first position that differs, in words; "" if there is none."""
    expected = list(zip(recorded.output_token_ids, recorded.logprobs, strict=False))
    again = list(zip(*found, strict=False))
    for position, (one, other) in enumerate(zip(expected, again, strict=False)):
        if one != other:
            return f"position {position}: token {one[0]} ({one[1]!r}) became {other[0]} ({other[1]!r})"
    if len(again) != len(recorded.output_token_ids):
        return f"{len(recorded.output_token_ids)} tokens became {len(again)}"
    return "" if len(expected) == len(again) else f"{len(expected)} log-probabilities became {len(again)}"
