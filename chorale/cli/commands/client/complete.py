"""``chorale complete``: continues raw text, without the chat format."""

from __future__ import annotations

import sys
from typing import Any

from chorale.cli.commands.client.chat import connected, parser
from chorale.cli.commands.client.session import sampling, typed_lines
from chorale.cli.commands.client.terminal import Printer, show
from chorale.cli.error import print_error
from chorale.config.options.parser import Parser
from chorale.errors import ChoraleError
from chorale.requests.openai_client import Client


def complete_parser() -> Parser:
    return parser("complete", "Continue raw text.")


def run(arguments: list[str]) -> int:
    given = complete_parser().read(arguments)
    with connected(given) as (client, model):
        body = {"model": model, "stream_options": {"include_usage": True}, "max_tokens": 128}
        body |= sampling(given)
        if given.quick is not None:
            return _complete(client, body | {"prompt": given.quick}, given.stats)
        for text in filter(None, typed_lines()):
            _complete(client, body | {"prompt": text}, given.stats)
    return 0


def _complete(client: Client, body: dict[str, Any], stats: bool) -> int:
    try:
        answer = show(client.stream("completions", body), Printer(plain=True))
    except ChoraleError as error:
        print_error(error.message)
        return 1
    if stats:
        print(f"({answer.stats})", file=sys.stderr)
    return 0
