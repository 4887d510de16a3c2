"""The conversation of ``chorale chat``: its messages and its commands."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from chorale.cli.commands.client.terminal import Answer, Printer, show
from chorale.cli.error import print_error
from chorale.config.suggestions import nearest
from chorale.errors import ChoraleError
from chorale.machine.folders import write_whole
from chorale.requests.openai_client import Client

EFFORTS = ("low", "medium", "high")
HELP = {
    "/help": "list these commands",
    "/system [TEXT]": "set the system prompt, or show it",
    "/effort [low|medium|high]": "set the reasoning effort, or show it",
    "/retry": "discard the last answer and ask again",
    "/clear": "start a new conversation",
    "/save FILE": "write the conversation to a file, as JSON",
    "/load FILE": "continue a saved conversation",
    "/quit": "end the chat (or Ctrl-D)",
}
_SAME = {"/reset": "/clear", "/exit": "/quit", "/bye": "/quit", "/?": "/help"}
_COMMANDS = [each.split()[0] for each in HELP]


def sampling(given: argparse.Namespace) -> dict[str, Any]:
    chosen = {"temperature": given.temperature, "max_tokens": given.max_tokens, "seed": given.seed}
    return {name: value for name, value in chosen.items() if value is not None}


def typed_lines() -> Iterator[str]:
    """Yields lines until the end of the input or Ctrl-C, after a prompt on a terminal."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() the arrow keys and a history)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                print()
            return
        yield line


class Message(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    reasoning: NotRequired[str]


class Session:
    """One conversation. ``messages`` is what was said so far; a question without an answer is not in it."""

    def __init__(self, client: Client, model: str, given: argparse.Namespace) -> None:
        self._client, self._model, self._given = client, model, given
        self._effort: str | None = given.reasoning_effort
        self._system: str | None = given.system_prompt
        self._unanswered: str | None = None  # the last question, if it failed
        self.messages: list[Message] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help, "/system": self._set_system, "/effort": self._set_effort,
            "/retry": self._retry, "/clear": self._clear, "/save": self._save, "/load": self._load,
        }  # fmt: skip

    def loop(self) -> int:
        endpoint = self._client.endpoint
        is_fallback = endpoint.socket is not None and not self._given.model
        why = " (no server at localhost:8000; --url names another)" if is_fallback else ""
        print(f"Chatting with {self._model} on {endpoint.where}{why}.")
        print("/help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat.")
        for line in map(str.strip, typed_lines()):
            if _is_command(line):
                if not self._command(line):
                    break
            elif line:
                self.ask(line)
        return 0

    # ------------------------------------------------------------------ commands

    def _command(self, line: str) -> bool:
        """Runs a command. Returns False if it ends the chat."""
        name, _, argument = line.partition(" ")
        name, argument = _SAME.get(name, name), argument.strip()
        run = self._commands.get(name)
        if name == "/quit":
            return False
        if run is None:
            print_error(f"unknown command {name}{nearest(name, _COMMANDS)} (/help lists the commands)")
        elif name in ("/save", "/load") and not argument:
            print_error(f"{name} needs the name of a file, for example {name} chat.json")
        elif name in ("/help", "/retry", "/clear") and argument:
            print_error(f"{name} takes no argument")
        else:
            run(argument)
        return True

    def _help(self, _: str) -> None:
        for name, meaning in HELP.items():
            print(f"  {name:<26} {meaning}")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
            print("System prompt set; it applies from the next message on.")
        else:
            print(f"System prompt: {self._system or '(none)'}")

    def _set_effort(self, level: str) -> None:
        if level in EFFORTS:
            self._effort = level
            print(f"Reasoning effort set to {level}.")
        elif level:
            print_error(f"unknown effort {level!r}{nearest(level, EFFORTS)} (low, medium or high)")
        else:
            print(f"Reasoning effort: {self._effort or '(the default of the server)'}")

    def _retry(self, _: str) -> None:
        asked = [n for n, each in enumerate(self.messages) if each["role"] == "user"]
        replaced: list[Message] = []
        question = self._unanswered
        if question is None:
            if not asked:
                print_error("there is no question to ask again")
                return
            question, replaced = self.messages[asked[-1]]["content"], self.messages[asked[-1] :]
            del self.messages[asked[-1] :]
        if self.ask(question) and replaced:
            self.messages += replaced  # the old answer is better than none
            self._unanswered = None

    def _clear(self, _: str) -> None:
        self.messages, self._unanswered = [], None
        print("Conversation cleared.")

    def _save(self, name: str) -> None:
        path = Path(name).expanduser()
        try:
            write_whole(path, json.dumps(self._with_system(), indent=1, ensure_ascii=False))
        except OSError as error:
            print_error(f"cannot write {path}: {error.strerror}")
        else:
            print(f"Saved {_count(self.messages)} to {path}.")

    def _load(self, name: str) -> None:
        path = Path(name).expanduser()
        try:
            messages = msgspec.json.decode(path.read_bytes(), type=list[Message])
        except OSError as error:
            print_error(f"cannot read {path}: {error.strerror}")
        except msgspec.DecodeError as error:
            print_error(f"{path} is not a saved conversation: {error}")
        else:
            has_system = bool(messages) and messages[0]["role"] == "system"
            self._system = messages.pop(0)["content"] if has_system else None
            self.messages, self._unanswered = messages, None
            print(f"Loaded {_count(messages)} from {path}.")

    # ------------------------------------------------------------------ questions

    def _with_system(self) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self.messages]

    def ask(self, text: str) -> int:
        """Sends one message and prints the answer.

        Removes the message on failure; /retry sends it again. Returns the exit code, 0 or 1.
        """
        self.messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {
            "model": self._model,
            "messages": self._with_system(),
            "stream_options": {"include_usage": True},
        } | sampling(self._given)
        if self._effort:
            body["reasoning_effort"] = self._effort
        try:
            answer = show(self._client.stream("chat/completions", body), Printer(self._given.plain))
        except ChoraleError as error:
            self.messages.pop()
            self._unanswered = text
            print_error(error.message)
            return 1
        self._unanswered = None
        self._keep(answer)
        return 0

    def _keep(self, answer: Answer) -> None:
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning"] = answer.reasoning
        self.messages.append(message)
        if answer.finish_reason == "length":
            print("(the answer reached its maximum length)", file=sys.stderr)
        elif answer.finish_reason == "interrupted":
            print("(stopped)", file=sys.stderr)
        if self._given.stats:
            print(f"({answer.stats})", file=sys.stderr)


def _is_command(line: str) -> bool:
    return line.startswith("/") and "/" not in line.split()[0][1:]  # a question may begin with a path


def _count(messages: list[Message]) -> str:
    return "1 message" if len(messages) == 1 else f"{len(messages)} messages"
