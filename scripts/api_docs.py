"""Writes the generated tables of docs/reference/api.md from the code that enforces them.

    python scripts/api_docs.py           rewrites the page
    python scripts/api_docs.py --check   exits 1 and prints the first line that differs

A table is between ``<!-- NAME -->`` and ``<!-- /NAME -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path

from pydantic import BaseModel

from chorale.api import fields, limits
from chorale.api.chat import request as chat
from chorale.api.completions import request as completions
from chorale.api.http.auth import OPEN_PATHS
from chorale.api.messages import request as messages
from chorale.api.openapi import operations
from chorale.api.responses import request as responses

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "api.md"


# Fields that are stored and echoed, without other effect.
ECHOED: dict[str, str] = {
    "metadata": "labels of the stored response",
    "user": "an end-user label",
    "safety_identifier": "an end-user label",
    "prompt_cache_key": "the prefix cache finds equal prefixes by itself",
    "service_tier": "there is one tier; responses say `default`",
    "text.verbosity": "a hint that this model was not trained on",
}


def fields_table(
    model: type[BaseModel], harmless: Mapping[str, str], refused: Mapping[str, fields.Refusal]
) -> str:
    """Returns a table of how each field of one endpoint is treated."""
    rows = ["| field | treatment |", "|---|---|"]
    rows += [f"| `{name}` | honoured |" for name in model.model_fields]
    rows += [f"| `{name}` | accepted without effect: {reason} |" for name, reason in harmless.items()]
    rows += [f"| `{name}` | refused (400): {refusal.reason} |" for name, refusal in refused.items()]
    return "\n".join(rows) + "\n"


def limits_table() -> str:
    """Returns the tables of parameter limits and of size limits as Markdown."""
    rows = ["| field | type | minimum | maximum | default | meaning |", "|---|---|---|---|---|---|"]
    for name, limit in limits.LIMITS.items():
        low = f"above {limit.min}" if limit.exclusive_min else str(limit.min)
        rows.append(f"| `{name}` | {limit.type} | {low} | {limit.max} | {limit.default} | {limit.doc} |")
    rows += ["", "| size | at most | meaning |", "|---|---|---|"]
    rows += [f"| `{name}` | {size.max} {size.unit} | {size.doc} |" for name, size in limits.SIZES.items()]
    return "\n".join(rows) + "\n"


def endpoints() -> str:
    rows = ["| method | path | what it does | key needed |", "|---|---|---|---|"]
    for operation in operations():
        key = "no" if operation.path in OPEN_PATHS else "yes"
        rows.append(f"| {operation.method.upper()} | `{operation.path}` | {operation.summary} | {key} |")
    return "\n".join(rows) + "\n"


def responses_table() -> str:
    table = fields_table(responses.ResponsesRequest, responses.HARMLESS, responses.REFUSED)
    echoed = [f"| `{name}` | kept and echoed: {why} |" for name, why in ECHOED.items()]
    kept = [line for line in table.splitlines() if line.split("`")[1:2] not in ([n] for n in ECHOED)]
    return "\n".join([*kept, *echoed]) + "\n"


def messages_table() -> str:
    table = fields_table(messages.MessagesRequest, messages.HARMLESS, messages.REFUSED)
    refused = {f"| `{name}` | honoured |" for name in messages.REFUSED}
    return "\n".join(line for line in table.splitlines() if line not in refused) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "endpoints": endpoints,
    "chat": lambda: fields_table(chat.ChatRequest, chat.HARMLESS, chat.REFUSED),
    "completions": lambda: fields_table(
        completions.CompletionRequest, completions.HARMLESS, completions.REFUSED
    ),
    "responses": responses_table,
    "messages": messages_table,
    "limits": limits_table,
}


def render(page: str) -> str:
    """Returns the page with current tables. Raises ``ValueError`` for a missing marker."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"docs/reference/api.md has no markers for the table {name!r}")
        body = table().strip() + "\n"
        page = pattern.sub(lambda match, body=body: match.group(1) + body + match.group(2), page)  # type: ignore[misc]
    return page


def first_difference(page: str, fresh: str) -> str:
    """Returns the first line that differs, with its text in the page and the generated text."""
    pairs = zip_longest(page.splitlines(), fresh.splitlines(), fillvalue="(end of the page)")
    for number, (old, new) in enumerate(pairs, 1):
        if old != new:
            return f"docs/reference/api.md:{number} differs:\n  page: {old}\n  code: {new}"
    return ""


def main() -> int:
    page = PAGE.read_text("utf-8")
    fresh = render(page)
    if "--check" in sys.argv:
        if difference := first_difference(page, fresh):
            print(difference, file=sys.stderr)
        return int(fresh != page)
    PAGE.write_text(fresh, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
