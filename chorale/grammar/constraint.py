"""Constraint: a separate grammar that one string of a turn must match, and the checks that need no compiler.

Where JSON allows white space, a constraint allows at most one space, or one line break with its indentation,
so that no generation can spend its tokens on blanks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, unquote

from chorale.errors import unsupported

MAX_BYTES = 64 * 1024  # one schema, pattern or grammar, as text
MAX_DEPTH = 120  # levels of JSON; the compiler reads 127, and an optional object takes four
LEAST = -(2**63) + 512  # below it, an integer range overflows the compiler's stack
MAX_MULTIPLE = 10_000  # multipleOf N becomes an automaton of N states: 10^4 take 20 ms, 10^6 5 s
WHITESPACE = "( |\n[ \t]{0,64})"

_JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
_TIGHT_OPTIONS: dict[str, Any] = {"whitespace_flexible": False}
# Lark tokens that may contain "<": strings, comments, regular expressions, left to right. Line breaks within
# them are allowed here, even where llguidance refuses them later.
_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\])+/', re.DOTALL)
_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
# Keywords whose value is a URI reference, and the characters allowed in one besides letters and digits.
_ADDRESSES = ("$ref", "$id")
_ADDRESS_CHARS = "%/#?:@!$&'()*+,;=~"
# Keywords that map names to schemas, and keywords whose value is not a schema.
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("const", "enum", "default", "examples")
# Keywords that the compiler does not know, and their values that any value satisfies. Libraries write them.
_VOID: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
_PASSES = 8  # number of passes over a schema's references
_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/(?:2019-09|2020-12))/schema#?")


@dataclass(frozen=True, slots=True)
class Constraint:
    """``body``: the text of a JSON Schema or of a Lark grammar. ``param``: its field in the request.

    ``tight``: JSON without any white space between its parts.
    """

    kind: Literal["json", "lark"]
    body: str
    param: str
    tight: bool = False

    @property
    def is_json(self) -> bool:
        return self.kind == "json"

    def entry(self, name: str) -> dict[str, Any]:
        """Return the entry in a list of grammars, to which other grammars refer as ``@name``."""
        if self.kind == "json":
            options = _TIGHT_OPTIONS if self.tight else _JSON_OPTIONS
            return {"name": name, "json_schema": {**json.loads(self.body), "x-guidance": options}}
        return {"name": name, "lark_grammar": self.body}


def json_schema(schema: Mapping[str, Any], param: str) -> Constraint:
    """Return a constraint to JSON that is valid under ``schema``. Raises ``RequestError``."""
    if _depth(schema, MAX_DEPTH + 1) > MAX_DEPTH:
        raise unsupported(param, f"the schema is nested deeper than {MAX_DEPTH} levels")
    body = json.dumps(_addressed(_in_known_dialect(schema)), ensure_ascii=False, separators=(",", ":"))
    check_size(body, param)
    _check_numbers(schema, param)
    if not _has_finite_value(schema, body):
        raise unsupported(param, "nothing satisfies it: the schema requires itself in every value")
    return Constraint("json", body, param)


def json_object(param: str) -> Constraint:
    return Constraint("json", '{"type":"object"}', param)


def regex(pattern: str, param: str) -> Constraint:
    """Return a constraint to strings that match ``pattern`` as a whole (Rust's syntax: no look-around, no
    back-references). Raises ``RequestError``."""
    body = pattern.removeprefix("^")
    if body.endswith("$") and not body.endswith("\\$"):
        body = body[:-1]
    if not body:
        raise unsupported(param, "the pattern is empty")
    # Escape slashes that are not escaped yet, as they end a Lark regex, and line breaks.
    body = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", body, flags=re.DOTALL)
    body = body.replace("\\\n", "\\n").replace("\n", "\\n").replace("\r", "\\r")
    return _lark(f"start: /{body}/", param)


def choice(texts: Sequence[str], param: str) -> Constraint:
    """Return a constraint to exactly one of ``texts``. Raises ``RequestError``."""
    if not texts or not all(texts):
        raise unsupported(param, "the choices must be non-empty strings")
    return _lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts), param)


def lark(grammar: str, param: str) -> Constraint:
    """Return a constraint by a Lark grammar (llguidance's dialect) without special tokens.

    Raises ``RequestError``.
    """
    if "<" in _LARK_TEXT.sub("", grammar):
        raise unsupported(param, "special tokens (<...>) are not allowed in a grammar")
    if "%json" in grammar and any(float(number) <= LEAST for number in _NEGATIVE.findall(grammar)):
        raise unsupported(param, "numbers must be greater than -2^63")
    return _lark(grammar, param)


def _lark(body: str, param: str) -> Constraint:
    check_size(body, param)
    return Constraint("lark", body, param)


# --------------------------------------------------------------------------- checks


def check_size(body: str, param: str) -> None:
    """Raises ``RequestError`` if the text is too long to compile or not valid Unicode."""
    try:
        is_too_long = len(body) > MAX_BYTES or len(body.encode()) > MAX_BYTES
    except UnicodeEncodeError:
        raise unsupported(param, "contains a lone surrogate") from None
    if is_too_long:
        raise unsupported(param, f"longer than {MAX_BYTES} bytes")


def _in_known_dialect(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema with a known ``$schema`` in the compiler's exact spelling, and without an unknown
    one, which then means the newest dialect."""
    if "$schema" not in schema:
        return schema
    rest = {name: value for name, value in schema.items() if name != "$schema"}
    found = _DIALECT.fullmatch(str(schema["$schema"]))
    if found is None:
        return rest
    scheme = "http" if found[1].startswith("draft-") else "https"
    return {"$schema": f"{scheme}://json-schema.org/{found[1]}/schema", **rest}


def _addressed(value: Any) -> Any:
    """Returns the schema with percent-encoded references, as the compiler requires, without ``_VOID``.

    Names of definitions may be in any script, or be types (``List[int]``), and libraries write them into
    ``$ref`` unencoded.
    """
    if isinstance(value, list):
        return [_addressed(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {key: _keyword(key, item) for key, item in value.items() if item not in _VOID.get(key, ())}


def _keyword(key: str, value: Any) -> Any:
    if key in _ADDRESSES and isinstance(value, str):
        return quote(value, safe=_ADDRESS_CHARS, errors="replace")
    if key in NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: _addressed(schema) for name, schema in value.items()}
    return value if key in VALUES else _addressed(value)


def _depth(value: Any, limit: int) -> int:
    """Return the nesting depth of containers, at most ``limit``."""
    if limit <= 0 or not isinstance(value, Mapping | list):
        return 0
    inner = value.values() if isinstance(value, Mapping) else value
    return 1 + max((_depth(item, limit - 1) for item in inner), default=0)


def _has_finite_value(schema: Mapping[str, Any], body: str) -> bool:
    """Returns False if the schema requires itself in every value, so that no value can end.

    Each pass finds more references that end. Returns True if ``_PASSES`` do not suffice.
    """
    targets = {ref: _target(schema, unquote(ref)) for ref in set(re.findall(r'"\$ref":"([^"]*)"', body))}
    ends: set[str] = set()
    for _ in range(_PASSES):
        num_known = len(ends)
        targets = dict(reversed(targets.items()))
        for ref, target in targets.items():
            if _ends(target, ends):
                ends.add(ref)
        if len(ends) == num_known:
            return _ends(schema, ends)
    return True


def _target(schema: Any, ref: str) -> Any:
    """Returns the schema to which a reference within the schema refers, or None."""
    for part in ref.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema if ref.startswith("#") else None


def _ends(schema: Any, ends: set[str]) -> bool:
    """Returns whether ``schema`` allows a value that needs no reference outside ``ends``."""
    if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
        return True
    if "$ref" in schema and quote(str(schema["$ref"]), safe=_ADDRESS_CHARS, errors="replace") not in ends:
        return False
    ways = [schema[way] for way in ("anyOf", "oneOf") if isinstance(schema.get(way), list)]
    parts = schema.get("allOf")
    return (
        all(any(_ends(each, ends) for each in way) for way in ways)
        and all(_ends(each, ends) for each in (parts if isinstance(parts, list) else ()))
        and (schema.get("type") != "object" or all(_ends(each, ends) for each in _required(schema)))
        and (schema.get("type") != "array" or all(_ends(each, ends) for each in _first_items(schema)))
    )


def _required(schema: Mapping[str, Any]) -> list[Any]:
    names, properties = schema.get("required"), schema.get("properties")
    if not isinstance(names, list) or not isinstance(properties, Mapping):
        return []
    return [
        properties.get(name, schema.get("additionalProperties")) for name in names if isinstance(name, str)
    ]


def _first_items(schema: Mapping[str, Any]) -> list[Any]:
    least, first = schema.get("minItems"), schema.get("prefixItems")
    if not isinstance(least, int):
        return []
    first = first if isinstance(first, list) else []
    return [*first[:least], *([schema.get("items")] if least > len(first) else [])]


def _check_numbers(value: Any, param: str) -> None:
    """Refuse numbers that end the process, and a ``multipleOf`` whose automaton would take seconds."""
    if isinstance(value, int | float) and value <= LEAST:
        raise unsupported(param, "numbers must be greater than -2^63")
    if isinstance(value, Mapping):
        factor = value.get("multipleOf")
        if isinstance(factor, int | float) and not isinstance(factor, bool):
            _check_factor(factor, param)
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        _check_numbers(item, param)


def _check_factor(factor: float, param: str) -> None:
    digits = str(factor).partition("e")[0].replace(".", "").lstrip("0")  # 0.25 counts as 25
    if "e" in str(factor) or len(digits) > 5 or int(digits or "0") > MAX_MULTIPLE:
        raise unsupported(
            param, f"multipleOf {factor} is not supported: its digits may be at most {MAX_MULTIPLE}"
        )
