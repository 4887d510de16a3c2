"""Every field of every request model has an effect (none is accepted and ignored) and a description.

``tests/api/field_reads.py`` finds the reads. A field that a property of the model reads counts as read if the
property is read.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

import pytest
from pydantic import BaseModel

import chorale.api
from chorale.api.chat.request import ChatRequest
from chorale.api.completions.request import CompletionRequest
from chorale.api.field_docs import DOCS
from chorale.api.messages.request import MessagesRequest
from chorale.api.responses.request import ResponsesRequest
from chorale.api.tokens.generated import DerenderChatRequest, DerenderCompletionRequest
from chorale.api.tokens.request import AbortRequest, GenerateRequest, TokenSampling
from chorale.config.sampling_fields import CHOSEN_BY_MODEL
from scripts.api_docs import ECHOED
from tests.api.field_reads import is_read, strings, through_self

# (model, field) -> why nothing reads it
WITHOUT_EFFECT: dict[tuple[str, str], str] = {
    ("BackgroundOptions", "completion_window"): "its only value is the default behaviour",
    ("BackgroundOptions", "continuation_id"): "a hint to prefer one queue; there is one",
    ("ContextManagement", "type"): "its only value names what the entry does",
    ("CreateItems", "include"): "items are always returned whole",
    ("CompactRequest", "service_tier"): "there is one tier",
    ("LoadRequest", "is_3d_lora_weight"): "the file of the adapter shows it",
    ("UnloadRequest", "lora_int_id"): "the name says which one, as in vLLM",
    ("ExpiresAfter", "anchor"): "its only value is the creation time",
    ("Generated", "output_mode"): "its only value is the form that can be read",
    ("UploadForm", "file"): "in the schema only: the content is read as it arrives",
    ("ResponsesRequest", "service_tier"): "there is one tier",
    ("TokenizeRequest", "add_special_tokens"): "gpt-oss adds none to a prompt",
}
# Fields that ``getattr`` reads -> (file, string in it that names the field).
BY_NAME = {
    **{f"guided_{way}": ("requests/formats.py", way) for way in ("json", "regex", "choice", "grammar")},
    **{
        name: ("api/tokens/derender.py", name)
        for name in ("generate_chunk", "generate_response", "generate_responses")
    },
    "function_call": ("api/chat/prepare.py", "function_call"),
}


def models() -> list[type[BaseModel]]:
    """Returns the request models: all pydantic models of ``chorale.api`` without subclasses."""
    for module in pkgutil.walk_packages(chorale.api.__path__, "chorale.api."):
        importlib.import_module(module.name)
    found, stack = [], [BaseModel]
    while stack:
        for model in stack.pop().__subclasses__():
            stack.append(model)
            if model.__module__.startswith("chorale.api.") and not model.__subclasses__():
                found.append(model)
    return sorted(found, key=lambda model: model.__qualname__)


def acts(model: type[BaseModel], name: str) -> bool:
    if name in CHOSEN_BY_MODEL:  # read in a loop; tests/test_sampling_fields.py tests that each arrives
        return True
    if name in BY_NAME:
        path, string = BY_NAME[name]
        return string in strings(path)
    return is_read(model, name)


def properties(model: type[BaseModel]) -> dict[str, frozenset[str]]:
    """Maps each property or method of the model to the attributes that it reads from ``self``."""
    return {
        name: used for each in model.__mro__ for name, used in through_self().get(each.__name__, {}).items()
    }


def unread(candidates: Iterable[type[BaseModel]]) -> set[tuple[str, str]]:
    missing = set()
    for model in candidates:
        passed_on = properties(model)
        for name in model.model_fields:
            through = [each for each, used in passed_on.items() if name in used and acts(model, each)]
            if not (through or acts(model, name)):
                missing.add((model.__name__, name))
    return missing


def test_every_request_field_is_read_outside_its_model() -> None:
    found = models()
    assert len(found) >= 8, [model.__name__ for model in found]
    assert sum(len(model.model_fields) for model in found) > 150
    assert unread(found) == set(WITHOUT_EFFECT)


MODELS: list[type[BaseModel]] = [
    *(ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest, GenerateRequest, TokenSampling),
    *(AbortRequest, DerenderChatRequest, DerenderCompletionRequest),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_field_that_acts_is_described(model: type[BaseModel]) -> None:
    fields = model.model_json_schema()["properties"]
    echoed = ECHOED if model is ResponsesRequest else {}
    assert [name for name, field in fields.items() if name not in echoed and "description" not in field] == []


def test_every_description_is_that_of_a_field() -> None:
    known = {
        name
        for model in MODELS
        for field in model.model_fields
        for name in (field, f"{model.__name__}.{field}")
    }
    assert DOCS.keys() <= known
