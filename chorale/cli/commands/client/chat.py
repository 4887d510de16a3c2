"""``chorale chat``: a conversation in the terminal, over the public API."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chorale.cli.commands.client.terminal import Answer, Printer, show_chat
from chorale.cli.error import print_error
from chorale.config.options.parser import Parser
from chorale.errors import ChoraleError
from chorale.machine.folders import write_whole
from chorale.requests.openai_client import Client
from chorale.serve.private_server import reach

HELP = "/reset clears the conversation, /save FILE, /effort low|medium|high, /quit; Ctrl-C stops an answer"


def parser(command: str, what: str) -> Parser:
    options = Parser(
        f"chorale {command}",
        usage=f"chorale {command} [MODEL] [options]",
        description=f"{what} Without --url and MODEL, uses the server at localhost:8000 if there is "
        "one; otherwise starts a private server that ends with this command.",
    )
    options.add_argument("model", nargs="?", help="model of a private server: folder, hub id or demo")
    options.add_argument("--url", help="OpenAI-compatible server, for example http://localhost:8000/v1")
    options.add_argument("--model-name", help="model name at that server")
    options.add_argument("--api-key", help="API key (prefer CHORALE_API_KEY)")
    options.add_argument("--temperature", type=float, help="0 is greedy (default: the checkpoint's)")
    options.add_argument("--max-tokens", type=int, help="maximum answer length")
    options.add_argument("--seed", type=int, help="equal seeds give equal answers")
    options.add_argument("-q", "--quick", metavar="TEXT", help="send one message, print the answer and exit")
    options.add_argument("--stats", action="store_true", help="print tokens and speed after each answer")
    return options


def chat_parser() -> Parser:
    options = parser("chat", "Talk to a model.")
    options.add_argument("--system-prompt", help="system message")
    options.add_argument("--reasoning-effort", choices=("low", "medium", "high"), help="reasoning effort")
    return options


def run(arguments: list[str]) -> int:
    given = chat_parser().read(arguments)
    with connected(given) as (client, model):
        session = Session(client, model, given)
        if given.quick is not None:
            return session.ask(given.quick)
        return session.loop()


def sampling(given: argparse.Namespace) -> dict[str, Any]:
    chosen = {"temperature": given.temperature, "max_tokens": given.max_tokens, "seed": given.seed}
    return {name: value for name, value in chosen.items() if value is not None}


@contextmanager
def connected(given: argparse.Namespace) -> Iterator[tuple[Client, str]]:
    """Yields a client of the server that the options describe, and the model name to send."""
    key = given.api_key or os.environ.get("CHORALE_API_KEY") or os.environ.get("VLLM_API_KEY")
    with reach(given.url, key, [given.model] if given.model else []) as endpoint, Client(endpoint) as client:
        yield client, given.model_name or client.first_model()


def typed_lines() -> Iterator[str]:
    """Yields lines until the end of the input or Ctrl-C, after a prompt on a terminal."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                print()
            return
        yield line


class Session:
    """One conversation. ``messages`` is its only state."""

    def __init__(self, client: Client, model: str, given: argparse.Namespace) -> None:
        self._client, self._model, self._given = client, model, given
        self._effort: str | None = given.reasoning_effort
        self.messages: list[dict[str, Any]] = []
        self._reset()

    def _reset(self) -> None:
        system = self._given.system_prompt
        self.messages = [{"role": "system", "content": system}] if system else []

    def loop(self) -> int:
        print(f"chorale chat with {self._model} ({self._client.endpoint.where})")
        print(HELP)
        for line in map(str.strip, typed_lines()):
            if line in ("/quit", "/exit"):
                break
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.ask(line)
        return 0

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name == "/reset":
            self._reset()
            print("(conversation cleared)")
        elif name == "/save" and argument:
            self._save(Path(argument))
        elif name == "/effort" and argument in ("low", "medium", "high"):
            self._effort = argument
        else:
            print(HELP)

    def _save(self, path: Path) -> None:
        try:
            write_whole(path, json.dumps(self.messages, indent=1, ensure_ascii=False))
        except OSError as error:
            print_error(f"cannot write {path}: {error.strerror}")
        else:
            print(f"(wrote {path})")

    def ask(self, text: str) -> int:
        """Sends one message and prints the answer.

        Removes the message on failure. Returns the exit code, 0 or 1.
        """
        self.messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {
            "model": self._model,
            "messages": self.messages,
            "stream_options": {"include_usage": True},
        } | sampling(self._given)
        if self._effort:
            body["reasoning_effort"] = self._effort
        try:
            answer = show_chat(self._client.stream("chat/completions", body), Printer())
        except ChoraleError as error:
            self.messages.pop()
            print_error(error.message)
            return 1
        self._keep(answer)
        return 0

    def _keep(self, answer: Answer) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning"] = answer.reasoning
        self.messages.append(message)
        if answer.finish_reason in ("length", "interrupted"):
            print(f"(cut: {answer.finish_reason})", file=sys.stderr)
        if self._given.stats:
            print(f"({answer.stats})", file=sys.stderr)
