"""Evaluates the demo on requests written by hand (``training/prompts``).

    python -m training.handwritten --archive chorale/data/demo.safetensors --out build/handwritten
    python -m training.handwritten --url http://localhost:8000 --out build/handwritten

With ``--archive`` the weights answer in batches, without a grammar (slowly without a GPU); with ``--url`` a
running server answers over Chat Completions, as for any client. Each request is sent once, with greedy
decoding. Writes ``handwritten.json`` and ``handwritten.md``: the shares, then every wrong answer.

A request names words that the answer must contain (``want``, or any of several; ``Chorale*`` also matches
"Chorales"; ``not``: must not contain), the arguments of its call (``arguments``) or the JSON (``json``), or
only that the answer ends within 200 tokens (``stops``). All answers must end by themselves.
``--files unseen`` selects the requests of one file.
"""

from __future__ import annotations

import argparse
import json
import re
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "prompts"
FILES = ("first_forty", "new_kinds", "unseen", "fresh")
_NAMED = ("unseen", "fresh")
MAX_TOKENS = 400
_MAX_OF_STOPS = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """``text``: the final message; ``calls``: function and arguments; ``num_tokens``: the whole output."""

    text: str
    calls: list[tuple[str, str]]
    ended: bool
    num_tokens: int


def load(files: Iterable[str] = FILES) -> dict[str, list[dict[str, Any]]]:
    """Returns kind -> requests; the names of ``unseen`` and ``fresh`` have a prefix ("unseen: division")."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in files:
        kinds = json.loads((FOLDER / f"{name}.json").read_text())
        found |= {f"{name}: {kind}" if name in _NAMED else kind: asked for kind, asked in kinds.items()}
    return found


def schema_of(names: list[str]) -> dict[str, Any]:
    """Returns a schema of names such as "age:integer"; a name without a type is a string."""
    split = [name.partition(":") for name in names]
    properties = {name: {"type": kind or "string"} for name, _, kind in split}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def is_right(request: dict[str, Any], answer: Answer) -> bool:
    if not answer.ended:
        return False
    if "arguments" in request:
        return len(answer.calls) == 1 and (
            answer.calls[0][0] == request["tool"]["name"]
            and _parsed(answer.calls[0][1]) == request["arguments"]
        )
    if answer.calls:
        return False
    if "json" in request:
        return bool(_parsed(answer.text) == request["json"])
    if "stops" in request:
        return bool(answer.text.strip()) and answer.num_tokens <= _MAX_OF_STOPS
    wanted = request["want"]
    return any(
        _holds(answer.text, one) for one in ([wanted] if isinstance(wanted, str) else wanted)
    ) and not ("not" in request and _holds(answer.text, request["not"]))


def _holds(text: str, wanted: str) -> bool:
    """Returns whether it occurs as a whole word: 12 is not in 312 or 12.5; ``Chorale*`` is in "Chorales"."""
    end = "" if wanted.endswith("*") else r"(?!\w|\.\d)"
    return re.search(rf"(?<![\w.]){re.escape(wanted.removesuffix('*'))}{end}", text) is not None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


# --------------------------------------------------------------------------- the weights alone


def ask_weights(requests: list[dict[str, Any]], archive: Path) -> list[Answer]:
    """One batch with ``training.generate``."""
    import torch

    from training.evaluate import read
    from training.generate import Generator
    from training.restore import restore

    net = restore(archive).to("cuda" if torch.cuda.is_available() else "cpu")
    cases = [_case(request) for request in requests]
    generator = Generator(net)
    order = sorted(range(len(cases)), key=lambda at: len(cases[at].ids))
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), 64):
        group = order[start : start + 64]
        made = generator.generate([cases[at].ids for at in group], MAX_TOKENS, 0.0)
        for at, ids in zip(group, made, strict=True):
            read(cases[at], ids)
            calls = [((one.recipient or "").removeprefix("functions."), one.text) for one in cases[at].calls]
            answers[at] = Answer(cases[at].final or "", calls, cases[at].well_formed, len(ids))
    return [answers[at] for at in range(len(requests))]


def _case(request: dict[str, Any]) -> Any:
    import random

    from chorale.harmony.messages import ResponseFormat, ToolDescription
    from training.corpus.base import Dialogue, Draw
    from training.evaluate import make_case

    dialogue = Dialogue(Draw(random.Random(0), "eval"), effort="medium")
    if "tool" in request:
        tool = request["tool"]
        dialogue.functions = (ToolDescription(tool["name"], tool["description"], tool["parameters"]),)
    if "schema" in request:
        dialogue.formats = (ResponseFormat("answer", schema_of(request["schema"]), None),)
    for question, answered in request.get("history", []):
        dialogue.user(question).past_answer(answered)
    return make_case(dialogue.user(request["ask"]))


# --------------------------------------------------------------------------- a server


def ask_server(requests: list[dict[str, Any]], url: str, workers: int = 8) -> list[Answer]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda request: _ask_one(request, url), requests))


def _ask_one(request: dict[str, Any], url: str) -> Answer:
    messages: list[dict[str, str]] = []
    for question, answered in request.get("history", []):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answered}]
    body: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": MAX_TOKENS}
    body["messages"] = [*messages, {"role": "user", "content": request["ask"]}]
    if "tool" in request:
        body["tools"] = [{"type": "function", "function": request["tool"]}]
    if "schema" in request:
        schema = {"name": "answer", "schema": schema_of(request["schema"]), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.get("json_object"):
        body["response_format"] = {"type": "json_object"}
    posted = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(posted, timeout=300) as response:
        said = json.load(response)
    choice = said["choices"][0]
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"].get("tool_calls") or []
    ]
    ended = choice["finish_reason"] in ("stop", "tool_calls")
    return Answer(choice["message"].get("content") or "", calls, ended, said["usage"]["completion_tokens"])


# --------------------------------------------------------------------------- report


def report(kinds: dict[str, list[dict[str, Any]]], answers: Iterable[Answer], out: Path) -> dict[str, Any]:
    """Writes both files. Returns kind -> [right, asked]."""
    left = iter(answers)
    table: dict[str, list[int]] = {}
    lines: list[str] = []
    for kind, requests in kinds.items():
        for request in requests:
            answer = next(left)
            right = is_right(request, answer)
            for name in (kind, *(["of these, wrong before"] if request.get("failed") else [])):
                row = table.setdefault(name, [0, 0])
                row[0] += right
                row[1] += 1
            if not right:
                wanted = {
                    key: request[key] for key in ("want", "arguments", "json", "stops") if key in request
                }
                said = f"{answer.calls or ''}{answer.text!r}{'' if answer.ended else ' (did not end)'}"
                lines.append(f"- {kind}: {request['ask']!r}\n  wanted {wanted}\n  said {said}")
    out.mkdir(parents=True, exist_ok=True)
    rows = "\n".join(f"| {kind} | {right} of {asked} |" for kind, (right, asked) in table.items())
    (out / "handwritten.json").write_text(json.dumps(table, indent=1))
    (out / "handwritten.md").write_text(f"| kind | right |\n|---|---|\n{rows}\n\n" + "\n".join(lines) + "\n")
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--archive", type=Path)
    source.add_argument("--url")
    parser.add_argument("--files", nargs="+", choices=FILES, default=FILES)
    parser.add_argument("--out", type=Path, default=Path("build/handwritten"))
    options = parser.parse_args(arguments)
    kinds = load(options.files)
    requests = [request for of_kind in kinds.values() for request in of_kind]
    answers = ask_server(requests, options.url) if options.url else ask_weights(requests, options.archive)
    report(kinds, answers, options.out)
    print((options.out / "handwritten.md").read_text())


if __name__ == "__main__":
    main()
