"""``chorale complete``: continues raw text, without the chat format."""

from __future__ import annotations

import sys
import time

from chorale.cli.commands.client.chat import connection_of, parser, sampling, typed_lines
from chorale.cli.commands.client.terminal import Answer, printable
from chorale.cli.error import print_error
from chorale.config.options.parser import Parser
from chorale.errors import ChoraleError
from chorale.serve.private_server import Connection


def complete_parser() -> Parser:
    return parser("complete", "Continue raw text.")


def run(arguments: list[str]) -> int:
    given = complete_parser().read(arguments)
    with connection_of(given) as connection:
        options = {"max_tokens": 128} | sampling(given)
        if given.quick is not None:
            return _complete(connection, given.quick, options, given.stats)
        for text in filter(None, typed_lines()):
            _complete(connection, text, options, given.stats)
    return 0


def _complete(connection: Connection, prompt: str, options: dict[str, object], stats: bool) -> int:
    answer, started = Answer(), time.perf_counter()
    body = {"model": connection.model, "prompt": prompt, "stream_options": {"include_usage": True}}
    try:
        for event in connection.stream("completions", body | options):
            answer.usage = event.get("usage") or answer.usage
            for choice in event.get("choices", []):
                answer.seconds_to_first = answer.seconds_to_first or time.perf_counter() - started
                sys.stdout.write(printable(choice.get("text") or ""))
                sys.stdout.flush()
    except ChoraleError as error:
        print_error(error.message)
        return 1
    except KeyboardInterrupt:
        pass
    print()
    if stats:
        answer.seconds = time.perf_counter() - started
        print(f"({answer.stats})", file=sys.stderr)
    return 0
