"""Writes the generated tables of api.md, api-fields.md, llm.md and metrics.md (docs/reference) from the code.

    python scripts/api_docs.py           rewrites the pages
    python scripts/api_docs.py --check   exits 1 and prints the first line that differs

A table is between ``<!-- NAME -->`` and ``<!-- /NAME -->``.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel

from chorale import errors
from chorale.api import fields, limits
from chorale.api.chat import request as chat
from chorale.api.completions import request as completions
from chorale.api.http.auth import OPEN_PATHS
from chorale.api.messages import request as messages
from chorale.api.operations import OPERATIONS
from chorale.api.responses import request as responses
from chorale.api.telemetry.engine_metrics import COUNTER, ENGINE_METRICS
from chorale.api.telemetry.metric_names import BY_SERVER, COUNTERS, STORE_GAUGES
from chorale.api.tokens import generated
from chorale.api.tokens import request as tokens
from chorale.llm.options import engine_arguments
from chorale.llm.params import sampling_arguments

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"


# Fields that are stored and echoed, without other effect.
ECHOED: dict[str, str] = {
    "metadata": "labels of the stored response",
    "user": "an end-user label",
    "safety_identifier": "an end-user label",
    "prompt_cache_key": "the prefix cache finds equal prefixes by itself",
    "service_tier": "there is only one tier; responses say `default`",
    "text.verbosity": "a hint that this model was not trained on",
}


def fields_table(
    model: type[BaseModel],
    harmless: Mapping[str, str],
    refused: Mapping[str, fields.Refusal],
    echoed: Mapping[str, str] = {},
) -> str:
    """Returns a table of the fields of one endpoint, grouped by how they are treated."""
    groups: dict[str, list[str]] = {}
    reasons = [(name, f"kept and echoed: {reason}") for name, reason in echoed.items()]
    reasons += [(n, f"accepted without effect: {why}") for n, why in harmless.items() if n not in echoed]
    reasons += [(name, f"refused (400): {refusal.reason}") for name, refusal in refused.items()]
    for name, treatment in reasons:
        groups.setdefault(treatment, []).append(name)
    rows = ["| treatment | fields |", "|---|---|"]
    rows += [f"| {treatment} | {', '.join(f'`{n}`' for n in names)} |" for treatment, names in groups.items()]
    honoured = sorted(name for name in model.model_fields if name not in echoed and name not in refused)
    return honoured_table(model, honoured) + "\n" + "\n".join(rows) + "\n"


def honoured_table(model: type[BaseModel], names: list[str]) -> str:
    """Returns a table with type, default and meaning of each honoured field."""
    schema = model.model_json_schema()
    rows = ["| honoured field | type | default | meaning |", "|---|---|---|---|"]
    for name in names:
        field = schema["properties"][name]
        default = f"`{json.dumps(field['default'])}`" if field.get("default") is not None else "none"
        if name in schema.get("required", ()):
            default = "required"
        elif default == "none" and name in limits.LIMITS:
            default = limits.LIMITS[name].default
        elif "$ref" in field or field.get("type") == "array":
            default = "none"  # of the form {"effort": null}
        rows.append(f"| `{name}` | {type_of(field)} | {default} | {field['description']} |")
    return "\n".join(rows) + "\n"


def all_fields_table(model: type[BaseModel]) -> str:
    return honoured_table(model, sorted(model.model_fields))


def type_of(field: Mapping[str, Any]) -> str:
    """Returns the type of a field in words, without null."""
    if "anyOf" in field:
        types = dict.fromkeys(type_of(each) for each in field["anyOf"] if each.get("type") != "null")
        return " or ".join(types)
    if len(field.get("enum", "")) in range(1, 5):
        return " or ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        inner = type_of(field["items"])
        return f"list of {inner.replace('list', 'lists', 1) if 'list' in inner else f'{inner}s'}"
    if "$ref" in field:
        return "object"
    return str(field.get("type", "string or list"))


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
    for operation in OPERATIONS:
        key = "no" if operation.path in OPEN_PATHS else "yes"
        rows.append(f"| {operation.method.upper()} | `{operation.path}` | {operation.summary} | {key} |")
    return "\n".join(rows) + "\n"


def own_metrics() -> str:
    """Returns a table of the metrics that begin with ``chorale:``."""
    found = {f"{name}_total": ("counter", *rest) for name, rest in COUNTERS.items()}
    found |= {name: ("gauge", *rest) for name, rest in STORE_GAUGES.items()}
    for metric in ENGINE_METRICS:
        if metric.kind is COUNTER:
            found[f"{metric.name}_total"] = ("counter", metric.doc, metric.labels)
        else:
            found[metric.name] = ("gauge", metric.doc, metric.labels)
    of_server = {*STORE_GAUGES, *(f"{name}_total" for name in BY_SERVER)}
    rows = ["| series | type | of | labels | meaning |", "|---|---|---|---|---|"]
    for name, (kind, doc, labels) in sorted(found.items()):
        if name.startswith("chorale:"):
            owner = "server" if name in of_server else "engine"
            rows.append(f"| `{name}` | {kind} | {owner} | {', '.join(f'`{n}`' for n in labels)} | {doc} |")
    return "\n".join(rows) + "\n"


# Status -> whether the same request may succeed later.
RETRY = {
    **dict.fromkeys((400, 403, 404, 405, 415, 417, 426, 431), "no: change the request"),
    401: "no: send a key",
    408: "yes",
    409: "no: the state of the object forbids it",
    413: "no: send less, or delete files",
    429: "yes, after `Retry-After`",
    500: "yes, a few times",
    503: "yes, after `Retry-After`",
}


def errors_table() -> str:
    """Returns a table of the errors by status and type, with all codes that the code gives them."""
    classes = {name: each for name, each in vars(errors).items() if _is_sent(each)}
    codes: dict[tuple[int, str], set[str]] = {}
    for each in classes.values():
        codes.setdefault((each.status, each.type), set()).add(str(each.default_code))
    for path in sorted(Path(errors.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call | ast.ClassDef) and path.name != "errors.py":
                for answer, code in _codes(node, classes):
                    codes.setdefault(answer, set()).add(code)
    rows = ["| status | type | codes | try again? |", "|---|---|---|---|"]
    for (status, kind), some in sorted(codes.items()):
        listed = ", ".join(f"`{code}`" for code in sorted(some))
        rows.append(f"| {status} | `{kind}` | {listed} | {RETRY[status]} |")
    return "\n".join(rows) + "\n"


def _codes(
    node: ast.Call | ast.ClassDef, classes: Mapping[str, type[errors.ChoraleError]]
) -> Iterator[tuple[tuple[int, str], str]]:
    """Yields status and type with the code that a call of an error class, or a new class, gives."""
    given = {each.arg: each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)}
    for made in [node.func] if isinstance(node, ast.Call) else node.bases:
        name = made.id if isinstance(made, ast.Name) else ""
        if given.get("code") and (name in classes or "status" in given):
            base = classes.get(name, errors.ChoraleError)
            yield (given.get("status", base.status), given.get("type", base.type)), given["code"]


def _is_sent(value: object) -> TypeGuard[type[errors.ChoraleError]]:
    if not isinstance(value, type) or not issubclass(value, errors.ChoraleError):
        return False
    return value is not errors.ChoraleError and not issubclass(value, errors.ConfigError)


def arguments_table(rows: Iterable[tuple[str, str, object, str]]) -> str:
    """Returns a table of the arguments of a Python class."""
    lines = ["| argument | type | default | meaning |", "|---|---|---|---|"]
    for name, kind, default, meaning in rows:
        kind = kind.replace("|", "\\|")
        lines.append(f"| `{name}` | `{kind}` | `{default!r}` | {meaning} |")
    return "\n".join(lines) + "\n"


# Page -> table -> what writes it.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "api.md": {"endpoints": endpoints, "errors": errors_table},
    "api-fields.md": {
        "chat": lambda: fields_table(chat.ChatRequest, chat.HARMLESS, chat.REFUSED),
        "completions": lambda: fields_table(
            completions.CompletionRequest, completions.HARMLESS, completions.REFUSED
        ),
        "responses": lambda: fields_table(
            responses.ResponsesRequest, responses.HARMLESS, responses.REFUSED, ECHOED
        ),
        "messages": lambda: fields_table(messages.MessagesRequest, messages.HARMLESS, messages.REFUSED),
        "generate": lambda: fields_table(tokens.GenerateRequest, tokens.HARMLESS, tokens.REFUSED),
        "sampling_params": lambda: fields_table(
            tokens.TokenSampling, tokens.SAMPLING_HARMLESS, tokens.SAMPLING_REFUSED
        ),
        "derender_chat": lambda: all_fields_table(generated.DerenderChatRequest),
        "derender_completion": lambda: all_fields_table(generated.DerenderCompletionRequest),
        "limits": limits_table,
    },
    "metrics.md": {"own": own_metrics},
    "llm.md": {
        "llm": lambda: arguments_table(engine_arguments()),
        "sampling": lambda: arguments_table(sampling_arguments()),
    },
}


def render(name: str, page: str) -> str:
    """Returns the page of that name with current tables. Raises ``ValueError`` for a missing marker."""
    for table, body_of in TABLES[name].items():
        pattern = re.compile(rf"(<!-- {table} -->\n).*?(<!-- /{table} -->)", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"docs/reference/{name} has no markers for the table {table!r}")
        body = body_of().strip() + "\n"
        page = pattern.sub(lambda match, body=body: match.group(1) + body + match.group(2), page)  # type: ignore[misc]
    return page


def first_difference(name: str, page: str, fresh: str) -> str:
    """Returns the first line that differs, with its text in the page and the generated text."""
    pairs = zip_longest(page.splitlines(), fresh.splitlines(), fillvalue="(end of the page)")
    for number, (old, new) in enumerate(pairs, 1):
        if old != new:
            return f"docs/reference/{name}:{number} differs:\n  page: {old}\n  code: {new}"
    return ""


def main() -> int:
    code = 0
    for name in TABLES:
        page = (FOLDER / name).read_text("utf-8")
        fresh = render(name, page)
        if "--check" not in sys.argv:
            (FOLDER / name).write_text(fresh, "utf-8")
        elif difference := first_difference(name, page, fresh):
            print(difference, file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
