"""``LLM`` and ``SamplingParams`` describe each of their arguments, for editors and for ``help()``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import get_type_hints

import pytest

from chorale import LLM, SamplingParams
from chorale.config.engine import EngineConfig
from chorale.errors import ConfigError
from chorale.llm.options import EngineOptions, as_arguments

# Fields with a wider type in LLM: a list for a tuple, a dictionary for an object.
WIDER = {
    "cpu_offload_params", "cudagraph_capture_sizes", "device_ids", "speculative_config", "kv_events_config",
    "override_generation_config", "profiler_config", "weight_transfer_config",
}  # fmt: skip


def test_the_arguments_of_llm_are_the_fields_of_the_engine() -> None:
    fields, options = get_type_hints(EngineConfig), get_type_hints(EngineOptions)
    assert fields.keys() - options.keys() == {"model", "host_share"}  # the latter is for replicas
    assert options.keys() - fields.keys() == {"data_parallel_size"}
    differing = {name for name in options.keys() & fields.keys() if options[name] != fields[name]}
    assert differing == WIDER


def test_the_signature_of_llm_has_the_defaults_of_the_engine() -> None:
    shown = inspect.signature(LLM).parameters
    for field in dataclasses.fields(EngineConfig):
        if field.name not in ("host_share", "prompt_delay"):  # LLM delays no prompts
            assert shown[field.name].default == field.default, field.name


@pytest.mark.parametrize("described", [LLM, SamplingParams])
def test_help_has_type_default_and_meaning_of_each_argument(described: type) -> None:
    text = described.__doc__ or ""
    for name, parameter in inspect.signature(described).parameters.items():
        row = re.search(rf"^{name}: (.+) = (.+)\n    (\S.+)", text, re.MULTILINE)
        assert row is not None, name
        assert row[1] == parameter.annotation
        assert row[2] == repr(parameter.default)


def test_errors_of_llm_name_arguments() -> None:
    assert as_arguments("--max-model-len and --gpu") == "max_model_len and --gpu"
    with pytest.raises(ConfigError, match=r"^max_model_len must be") as error:
        LLM("demo", max_model_len=1)
    assert "--" not in error.value.message


@pytest.mark.parametrize("name", ["beam_search", "collective_rpc", "embed", "start_draft_weight_update"])
def test_a_missing_attribute_of_vllm_says_why(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}' \(.+\)"):
        getattr(LLM.__new__(LLM), name)
