"""Makes 40 attempts to get an endless answer, without a token limit, and measures how long each takes.

    python -m benchmarks.serving.runaway [MODEL]     starts a server, by default of the demo
    python -m benchmarks.serving.runaway --url URL [--key KEY]

Prompts that invite endless answers, with every kind of constraint, tool, effort, choice and endpoint. Prints
one line an attempt (seconds, output tokens, status, how it ended) and the longest time. Exits with 1 if an
attempt failed or took longer than ``--seconds``. The server is asked for one attempt at a time. Messages
requires a limit and gets one that is never reached.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from tests.support.served import serving

TOOLS = ("--tool-server", "demo")
LONG = "Count upwards from one, one number a line, and never stop."
REPEAT = "Write the word again, again and again, without an end."
STORY = "Tell me the longest story that you can, with every detail."
THINK = "Think about every natural number, one after the other, before you answer."
FUNCTION: dict[str, Any] = {
    "name": "lookup",
    "description": "Looks something up.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
TOOL = {"type": "function", **FUNCTION}
FREE = {"type": "custom", "name": "write", "description": "Takes any text."}
ANY_ARRAY = {"type": "array", "items": {"type": "integer"}}
TREE = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}, "text": {}}}


@dataclass(frozen=True)
class Attempt:
    name: str
    path: str
    body: dict[str, Any]


def chat(name: str, text: str = LONG, **fields: Any) -> Attempt:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return Attempt(f"chat: {name}", "/v1/chat/completions", body)


def respond(name: str, prompt: Any = LONG, **fields: Any) -> Attempt:
    return Attempt(f"responses: {name}", "/v1/responses", {"input": prompt, **fields})


def schema(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}


def attempts() -> list[Attempt]:
    history = [
        {"role": role, "content": f"Remember the number {number}. " * 20}
        for number in range(20)
        for role in ("user", "assistant")
    ]
    long_ago = [*history, {"role": "user", "content": STORY}]
    return [
        chat("count"),
        chat("repeat", REPEAT),
        chat("story", STORY),
        chat("think, low", THINK, reasoning_effort="low"),
        chat("think, high", THINK, reasoning_effort="high"),
        chat("temperature 2", STORY, temperature=2),
        chat("greedy", REPEAT, temperature=0),
        chat("four choices", STORY, n=4),
        chat("unknown language", "Ẁŕîţę ḟøŕ ęvęŕ ɐuq ǝʌǝɹ"),
        chat("empty", ""),
        chat("json_object", response_format={"type": "json_object"}),
        chat("json_object, story", STORY, response_format={"type": "json_object"}),
        chat("json_object, hot", STORY, response_format={"type": "json_object"}, temperature=2),
        chat("array without an end", response_format=schema(ANY_ARRAY)),
        chat("recursive schema", STORY, response_format=schema(TREE)),
        chat("regex without an end", structured_outputs={"regex": "(a|b)+"}),
        chat("grammar without an end", structured_outputs={"grammar": 'start: ("x" | "y")+'}),
        chat("tools", tools=[CHAT_TOOL]),
        chat("tool_choice none", tools=[CHAT_TOOL], tool_choice="none"),
        chat("tool_choice none, story", STORY, tools=[CHAT_TOOL], tool_choice="none"),
        chat("tool_choice required", tools=[CHAT_TOOL], tool_choice="required"),
        chat("thinking budget", THINK, thinking_token_budget=50),
        chat("streamed", STORY, stream=True),
        chat("penalised", STORY, presence_penalty=2, frequency_penalty=2),
        respond("count"),
        respond("story, high", STORY, reasoning={"effort": "high"}),
        respond("json_object", text={"format": {"type": "json_object"}}),
        respond("json_object, tools", text={"format": {"type": "json_object"}}, tools=[TOOL]),
        respond("tool_choice none", tools=[TOOL], tool_choice="none"),
        respond("custom tool", tools=[FREE], tool_choice={"type": "custom", "name": "write"}),
        respond("streamed", THINK, stream=True),
        respond(
            "compaction", long_ago, context_management=[{"type": "compaction", "compact_threshold": 200}]
        ),
        respond("compaction alone", [*long_ago, {"type": "compaction_trigger"}]),
        respond("search", "Search the web for everything there is.", tools=[{"type": "web_search"}]),
        respond(
            "search, high", "Search for ever.", tools=[{"type": "web_search"}], reasoning={"effort": "high"}
        ),
        Attempt("responses: compact", "/v1/responses/compact", {"model": "demo", "input": long_ago}),
        Attempt("completions: default limit", "/v1/completions", {"prompt": LONG}),
        Attempt("completions: 16 prompts", "/v1/completions", {"prompt": [REPEAT] * 16}),
        Attempt("messages: story", "/v1/messages", messages(STORY)),
        Attempt("messages: any tool", "/v1/messages", messages(STORY, tools=True)),
    ]


def messages(text: str, tools: bool = False) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "demo",
        "max_tokens": 1024,
        "messages": [{"role": "user", "content": text}],
    }
    if tools:
        tool = {"name": "lookup", "description": "Looks up.", "input_schema": FUNCTION["parameters"]}
        body |= {"tools": [tool], "tool_choice": {"type": "any"}}
    return body


def ended(response: httpx2.Response) -> str:
    """Returns the status and how the answer ended."""
    text = response.text
    found = re.findall(r'"(?:finish_reason|stop_reason)":\s*"(\w+)"', text)
    found += re.findall(r'"object":\s*"response".{0,400}?"status":\s*"(\w+)"', text)
    code = re.findall(r'"code":\s*"(\w+)"', text) if response.status_code >= 400 else []
    return f"{response.status_code} {','.join(sorted(set(found or code)))}"


def num_tokens(text: str) -> str:
    found = re.findall(r'"(?:completion_tokens|output_tokens)":\s*(\d+)', text)
    return found[-1] if found else "-"


def measure(url: str, key: str | None, limit: float, only: str) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    longest, failures = (0.0, ""), 0
    with httpx2.Client(base_url=url, headers=headers, timeout=limit) as http:
        for number, attempt in enumerate(attempts(), 1):
            if only not in attempt.name:
                continue
            began = time.monotonic()
            try:
                response = http.post(attempt.path, json=attempt.body)
                how, tokens = ended(response), num_tokens(response.text)
                failures += response.status_code >= 500
            except httpx2.TimeoutException:
                how, tokens, failures = "did not end", "-", failures + 1
            seconds = time.monotonic() - began
            if seconds > limit and how != "did not end":  # the client's timeout is for each read
                how, failures = f"{how}, too slow", failures + 1
            longest = max(longest, (seconds, attempt.name))
            print(f"{number:2}  {attempt.name:36} {seconds:7.1f} s  {tokens:>6} tokens  {how}", flush=True)
    print(f"longest: {longest[0]:.1f} s ({longest[1]}); failures: {failures}")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--url", help="URL of a running server")
    parser.add_argument("--key")
    parser.add_argument("--seconds", type=float, default=120.0, help="maximum seconds of an attempt")
    parser.add_argument("--only", default="", help="only attempts whose names contain this")
    args = parser.parse_args()
    if args.url is not None:
        return measure(args.url, args.key, args.seconds, args.only)
    with tempfile.TemporaryDirectory() as folder, serving(args.model, Path(folder), *TOOLS) as served:
        return measure(served.url, args.key, args.seconds, args.only)


if __name__ == "__main__":
    raise SystemExit(main())
