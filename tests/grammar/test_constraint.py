"""What of a schema is written differently for the compiler, and what is said of one that it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorale.errors import QueueFullError, RequestError
from chorale.grammar import checker
from chorale.grammar.checker import GrammarChecker
from chorale.grammar.constraint import MAX_BYTES, MAX_DEPTH, check_size, json_schema, regex
from chorale.grammar.frames import raw_grammar
from chorale.grammar.matcher import check_constraint, compile_grammar, to_lark
from chorale.grammar.place import explained
from chorale.harmony.vocab import load_vocabulary
from chorale.requests.formats import constraint_of
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.fuzz.worst_input import check_linear


def accepts(schema: dict[str, Any], text: str) -> bool:
    constraint = json_schema(schema, "p")
    check_constraint(constraint)
    matcher = compile_grammar(raw_grammar(constraint))
    tokens = load_vocabulary().encode(text)
    return matcher.validate_tokens(tokens) == len(tokens)


@pytest.mark.parametrize("name", ["住所", "Größe", "list of int", "List[int]", "Map<string>", "a%20b"])
def test_a_definition_may_have_any_name(name: str) -> None:
    """As a client's library writes the reference: with the name as it is, or escaped as in an address."""
    schema = {"$ref": f"#/$defs/{name}", "$defs": {name.replace("%20", " "): {"type": "boolean"}}}
    assert accepts(schema, "true")
    assert not accepts(schema, "7")


def nested(depth: int) -> dict[str, Any]:
    """Objects within objects; the innermost one has a number."""
    schema: dict[str, Any] = {"type": "number"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_the_compiler_accepts_the_maximum_depth() -> None:
    """Each object and its ``properties`` are a level, and so is the number."""
    deepest = json_schema(nested(MAX_DEPTH // 2 - 1) | {"default": {}}, "p")
    check_constraint(deepest)
    with pytest.raises(RequestError) as caught:
        json_schema(nested(MAX_DEPTH // 2), "p")
    assert caught.value.code == "unsupported_value"


def test_optional_objects_may_be_nested_28_deep() -> None:
    """As pydantic writes them: each is four levels of JSON deeper."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(28):
        schema = {"type": "object", "properties": {"a": {"anyOf": [schema, {"type": "null"}]}}}
    check_constraint(json_schema(schema, "p"))


ITSELF = {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}, "required": ["t"]}
MANY = {"type": "array", "items": {"$ref": "#/$defs/t"}, "minItems": 1}
OR_NULL = {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("definition", "schema", "ends"),
    [
        (ITSELF, {"$ref": "#/$defs/t"}, False),
        (ITSELF, {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}, "required": ["a"]}, False),
        (ITSELF, {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}}, True),
        (ITSELF, MANY, False),
        (ITSELF, MANY | {"minItems": 0}, True),
        (ITSELF, {"type": "array", "prefixItems": [{"$ref": "#/$defs/t"}], "minItems": 1}, False),
        (ITSELF, {"anyOf": [{"$ref": "#/$defs/t"}, MANY]}, False),
        (ITSELF, OR_NULL, True),
        (ITSELF, {"allOf": [{"$ref": "#/$defs/t"}]}, False),
        (MANY, {"$ref": "#/$defs/t"}, False),
        (ITSELF | {"required": []}, {"$ref": "#/$defs/t"}, True),
        (ITSELF | {"properties": {"t": OR_NULL}}, {"$ref": "#/$defs/t"}, True),
        (ITSELF | {"properties": {"t": {"$ref": "#"}}}, {"$ref": "#/$defs/t"}, False),
    ],
)
def test_a_schema_with_infinite_values_is_refused(
    definition: dict[str, Any], schema: dict[str, Any], ends: bool
) -> None:
    whole = {"$defs": {"t": definition}, **schema}
    if ends:
        json_schema(whole, "p")
        return
    with pytest.raises(RequestError) as caught:
        json_schema(whole, "p")
    assert (caught.value.param, caught.value.code) == ("p", "unsupported_value")


def test_references_are_followed_in_linear_time() -> None:
    def work(num: int) -> tuple[Callable[[], Any], int]:
        chain: dict[str, Any] = {
            f"d{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}, "required": ["x"]}
            for n in range(num)
        }
        schema = {"$defs": chain | {f"d{num}": {"type": "null"}}, "$ref": "#/$defs/d0"}
        return lambda: json_schema(schema, "p"), 80 * num

    assert check_linear(work, 80).held_seconds < 0.05


@pytest.mark.parametrize(("num_optional", "fits"), [(400, True), (600, False)])
def test_the_number_of_optional_properties_is_limited(num_optional: int, fits: bool) -> None:
    names = {f"property_{number}": {"type": "string"} for number in range(num_optional)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    made = json_schema(schema, "p")
    if fits:
        check_constraint(made)
    else:
        with pytest.raises(ValueError, match="too complex"):
            check_constraint(made)
    check_constraint(json_schema(schema | {"required": list(names)}, "p"))


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= nosuchrule",
        'x ::= "a"',
        'root ::= "a"\nroot ::= "b"',
        'root ::= "a" b\nb ::= "x"\n b::="y"',
        "root ::= (a",
        "root ::= " + "(" * 900 + '"a"' + ")" * 900,
        "root ::= " + "(" * 5000,
        "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in range(2000)) + 'a2000 ::= "a"',
        "root ::= [",
        "::=",
        'a-b ::= "x"\na_b ::= "y"\nroot ::= a-b a_b',
    ],
)
def test_gbnf_with_a_fault_is_a_400_that_names_the_field(grammar: str) -> None:
    with pytest.raises(RequestError) as caught:
        constraint_of("grammar", grammar, "guided_grammar")
    assert (caught.value.status, caught.value.param) == (400, "guided_grammar")


@given(
    st.lists(
        st.sampled_from(
            ["root", " ::= ", '"a"', "[a-z]", "(", ")", "|", "*", "+", "?", "{1,2}", "\n", "x-y", "#", " "]
        )
    )
)
def test_any_gbnf_is_translated_or_raises_a_value_error(parts: list[str]) -> None:
    with contextlib.suppress(ValueError):
        assert "start" in to_lark("root ::= " + "".join(parts))


def test_an_id_may_be_a_title() -> None:
    inner = {"type": "object", "properties": {"a": {"$ref": "#/definitions/é"}}, "required": ["a"]}
    assert accepts({"$id": "My Schema", **inner, "definitions": {"é": {"type": "null"}}}, '{"a":null}')


def test_references_are_found_in_all_subschemas() -> None:
    reference = {"$ref": "#/$defs/名"}
    places: list[dict[str, Any]] = [
        {"anyOf": [{"type": "null"}, {"type": "array", "items": reference, "minItems": 1}]},
        {"type": "array", "prefixItems": [reference], "minItems": 1},
    ]
    for place in places:
        assert accepts({**place, "$defs": {"名": {"const": 5}}}, "[5]")
    # Names of properties that spell keywords are names.
    spelled = {"type": "object", "properties": {"const": reference, "$ref": reference}, "required": ["const"]}
    assert accepts({**spelled, "$defs": {"名": {"const": 5}}}, '{"const":5,"$ref":5}')


def test_values_are_unchanged() -> None:
    value = {"$ref": "#/住 所", "$id": "a b"}
    assert accepts({"const": value}, json.dumps(value, ensure_ascii=False))
    assert accepts({"enum": [value]}, json.dumps(value, ensure_ascii=False))


async def test_the_checker_limits_running_compilations_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "MAX_PENDING", 2)

    own = GrammarChecker(ScriptedClient(lambda request, index: Script(())).check_grammar)
    for pattern in ("a", "b", "c"):
        await own.check([regex(pattern, "p")])
        with pytest.raises(RequestError):
            await own.check([regex(pattern + "(", "p")])
    checks = (own.check([regex(pattern, "p")]) for pattern in ("d", "e", "f"))
    found = await asyncio.gather(*checks, return_exceptions=True)
    assert [type(each) for each in found].count(QueueFullError) == 1


@pytest.mark.parametrize("text", ["a\ud800", "\udc00", "x" * (MAX_BYTES + 1), "é" * (MAX_BYTES // 2 + 1)])
def test_a_text_that_cannot_be_compiled_is_refused(text: str) -> None:
    check_size("é" * (MAX_BYTES // 2), "field")
    with pytest.raises(RequestError) as refused:
        check_size(text, "field")
    assert refused.value.param == "field"


# --------------------------------------------------------------------------- the place of a fault

BAD: dict[str, dict[str, Any]] = {
    ".pattern": {"type": "string", "pattern": "(?=x)y"},
    ".format": {"type": "string", "format": "tea"},
    ".items.not": {"type": "array", "items": {"not": {"type": "null"}}},
    ".anyOf[1].pattern": {"anyOf": [{"pattern": "a", "type": "string"}, {"type": "string", "pattern": "("}]},
}


@pytest.mark.parametrize("place", BAD)
def test_the_message_has_the_place(place: str) -> None:
    properties = {"not": {"type": "string", "enum": ["(", "tea"]}, "a b": BAD[place]}
    constraint = json_schema({"type": "object", "properties": properties}, "format.schema")
    with pytest.raises(ValueError, match=r"parse error|Unknown|Unimplemented") as caught:
        check_constraint(constraint)
    said = explained(constraint, str(caught.value))
    assert said.startswith(f'format.schema.properties["a b"]{place}: ')


def test_without_a_known_place_the_field_is_named() -> None:
    constraint = json_schema({"type": "object"}, "format.schema")
    assert explained(constraint, "too complex: x") == "format.schema: too complex: x"


OVERLAP = {"oneOf": [{"type": "number"}, {"type": "integer"}]}
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    ".properties.a.oneOf": ({"a": OVERLAP}, "oneOf"),
    "": ({"a": OVERLAP, "b": {"oneOf": [{"type": "string"}, {"type": "null"}]}}, "oneOf"),
    ".properties.a.minProperties": ({"a": {"properties": {"b": {}}, "minProperties": 1}}, "minProperties"),
    ".properties.a.uniqueItems": ({"a": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ".properties.a.format": ({"a": {"type": "string", "format": "iri"}}, "date-time"),
}


@pytest.mark.parametrize("place", REASONS)
def test_the_message_says_which_keyword_and_where_unless_that_is_unknown(place: str) -> None:
    properties, word = REASONS[place]
    constraint = json_schema({"type": "object", "properties": properties}, "s")
    with pytest.raises(ValueError, match=r"(?i)constraints|properties|keys|format") as caught:
        check_constraint(constraint)
    at, _, reason = explained(constraint, str(caught.value)).partition(": ")
    assert at == f"s{place}"
    assert word in reason


@pytest.mark.parametrize(
    "keyword",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"uniqueItems": {"const": False}}, "unevaluatedProperties": True},
        {"type": "object", "dependentRequired": {}, "dependentSchemas": {}},
        {"oneOf": [{"type": "string", "format": "date"}, {"type": "integer"}]},
    ],
)
def test_keywords_that_restrict_nothing_are_accepted(keyword: dict[str, Any]) -> None:
    constraint = json_schema({"type": "object", "properties": {"a": keyword}}, "s")
    check_constraint(constraint)
    assert '"uniqueItems":false' not in constraint.body
