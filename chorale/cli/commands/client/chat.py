"""``chorale chat``: a conversation in the terminal, over the public API."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from chorale.cli.commands.client.session import EFFORTS, Session
from chorale.config.options.parser import Parser
from chorale.requests.openai_client import Client
from chorale.serve.private_server import reach


def parser(command: str, what: str) -> Parser:
    options = Parser(
        f"chorale {command}",
        usage=f"chorale {command} [MODEL] [options]",
        description=f"{what} Without --url and MODEL, uses the server at localhost:8000 if there is "
        "one; otherwise starts a private server that ends with this command.",
    )
    options.add_argument("model", nargs="?", help="model of a private server: folder, hub id or demo")
    options.add_argument("--url", help="OpenAI-compatible server, for example http://localhost:8000/v1")
    options.hints["--port"] = "; name the server with --url http://localhost:PORT"
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
    options.add_argument("--reasoning-effort", choices=EFFORTS, help="reasoning effort")
    options.add_argument(
        "--plain", action="store_true", help="show answers as written, without rendering Markdown"
    )
    return options


def run(arguments: list[str]) -> int:
    given = chat_parser().read(arguments)
    with connected(given) as (client, model):
        session = Session(client, model, given)
        if given.quick is not None:
            return session.ask(given.quick)
        return session.loop()


@contextmanager
def connected(given: argparse.Namespace) -> Iterator[tuple[Client, str]]:
    """Yields a client of the server that the options describe, and the model name to send."""
    key = given.api_key or os.environ.get("CHORALE_API_KEY") or os.environ.get("VLLM_API_KEY")
    with reach(given.url, key, [given.model] if given.model else []) as endpoint, Client(endpoint) as client:
        yield client, given.model_name or client.first_model()
