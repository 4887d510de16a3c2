"""The table of limits: the request models and their schemas at every boundary."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from chorale.api.http.body import parse_model
from chorale.api.limits import LIMITS, Limit
from chorale.api.operations import OPERATIONS
from chorale.errors import RequestError


def good_values(limit: Limit) -> list[float]:
    low = limit.min + (1e-6 if limit.exclusive_min else 0)
    values = [low, limit.max] if limit.type == "number" else [int(low), int(limit.max), float(int(low))]
    return list(values)


def bad_values(limit: Limit) -> list[Any]:
    step = 1 if limit.type == "integer" else 1e-6
    wrong = [True, False, "5", "", [], {}, math.nan, math.inf, -math.inf, 10**30, -(10**30), 1e30]
    wrong += [limit.max + step, limit.min - step, *([limit.min] if limit.exclusive_min else [])]
    if limit.type == "integer":
        wrong.append((limit.min if limit.min > -(2**40) else 0) + 0.5)
    if limit.min >= 0:
        wrong.append(-1)
    return wrong


def test_every_limit_belongs_to_a_field_or_a_query_parameter() -> None:
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    of_fields = {name for body in bodies for name in body.model_fields}
    within_fields = {"token_id", "compact_threshold", "completions.max_tokens", "expires_after.seconds"}
    within_fields |= {"index", "logprob", "rank"}  # of generated tokens
    of_queries = {"limit", "files.limit", "starting_after"}
    assert LIMITS.keys() - of_fields == within_fields | of_queries


# --------------------------------------------------------------------------- the request models

# The fields that each model requires in addition to the field under test.
REST: dict[str, dict[str, Any]] = {
    "ChatRequest": {"messages": [{"role": "user", "content": "a"}]},
    "CompletionRequest": {"prompt": "a"},
    "ResponsesRequest": {"input": "a"},
    "MessagesRequest": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
    "CountRequest": {"messages": [{"role": "user", "content": "a"}]},
    "TokenizeRequest": {"prompt": "a"},
    "DetokenizeRequest": {"tokens": []},
    "BatchChatRequest": {"messages": [[{"role": "user", "content": "a"}]]},
    "GenerateRequest": {"token_ids": [1], "sampling_params": {}},
    "DerenderChatRequest": {"chat_request": {}},
    "DerenderCompletionRequest": {},
}
# Fields whose elements are numbers -> a value with one element.
ELEMENTS = {
    "tokens": lambda value: [value],
    "token_ids": lambda value: [value],
    "prompt_token_ids": lambda value: [1, value],
    "stop_token_ids": lambda value: [value],
    "allowed_token_ids": lambda value: [value],
    "logprob_token_ids": lambda value: [value],
    "logit_bias": lambda value: {"5": value},
    "thinking": lambda value: {"type": "enabled", "budget_tokens": value},
}


def numeric_fields() -> Iterator[Any]:
    """Yields (model, field) for every request field whose schema contains a number."""
    models = {operation.body for operation in OPERATIONS if operation.body is not None}
    for model in sorted(models, key=lambda each: each.__name__):  # parallel workers must agree on the order
        for field, schema in model.model_json_schema()["properties"].items():
            text = json.dumps(schema)
            if '"integer"' in text or '"number"' in text:
                yield pytest.param(model, field, id=f"{model.__name__}.{field}")


def own_limit(model: type[BaseModel], field: str) -> Limit | None:
    """Returns the limit of the table that a field's schema contains, or None."""
    schema = model.model_json_schema()["properties"][field]
    text = json.dumps(schema)
    fitting = [
        limit
        for limit in LIMITS.values()
        if json.dumps(limit.schema["maximum"]) in text and f'"type": "{limit.type}"' in text
    ]
    return next((limit for limit in fitting if _inside(limit.schema, schema)), None)


def _inside(wanted: dict[str, Any], schema: Any) -> bool:
    if isinstance(schema, dict):
        if all(schema.get(key) == value for key, value in wanted.items()):
            return True
        return any(_inside(wanted, value) for value in schema.values())
    return isinstance(schema, list) and any(_inside(wanted, value) for value in schema)


@pytest.mark.parametrize(("model", "field"), list(numeric_fields()))
def test_request_models_refuse_what_the_table_refuses(model: type[BaseModel], field: str) -> None:
    limit = own_limit(model, field)
    assert limit is not None, f"{model.__name__}.{field} has a number that is not in the table"
    wrap = ELEMENTS.get(field, lambda value: value)
    rest = REST[model.__name__]
    for value in good_values(limit):
        parsed = getattr(parse_model(model, {**rest, field: wrap(value)}), field)
        if field not in ELEMENTS:
            assert (parsed, type(parsed)) == (value, int if limit.type == "integer" else float)
    for value in bad_values(limit):
        if field not in ELEMENTS and isinstance(value, str | list | dict | bool):
            mentioned = json.dumps(model.model_json_schema()["properties"][field])
            kind = {str: "string", list: "array", dict: "object", bool: "boolean"}[type(value)]
            if f'"{kind}"' in mentioned:
                continue  # a union that accepts this type
        with pytest.raises(RequestError) as caught:
            parse_model(model, {**rest, field: wrap(value)})
        assert caught.value.status == 400
        assert (caught.value.param or "").startswith(field)
