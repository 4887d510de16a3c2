"""The configuration files in examples/recipes: each is valid and uses the number of GPUs in its name."""

from __future__ import annotations

import re

import pytest

from chorale.config.options.settings import merge
from tests.support import ROOT

RECIPES = ROOT / "examples" / "recipes"
NAMES = (
    "gpt-oss-120b-1-gpu.yaml",
    "gpt-oss-120b-2-gpus.yaml",
    "gpt-oss-120b-8-gpus.yaml",
    "gpt-oss-20b-1-gpu.yaml",
    "gpt-oss-20b-2-gpus-fastest-stream.yaml",
    "gpt-oss-20b-4-gpus.yaml",
    "gpt-oss-safeguard-20b-1-gpu.yaml",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_uses_the_number_of_gpus_in_its_name(name: str) -> None:
    found = re.match(r"(gpt-oss-(?:safeguard-)?\d+b)-(\d)-gpu", name)
    assert found is not None
    settings = merge(["--config", str(RECIPES / name)], {})
    assert settings.engine.model == f"openai/{found[1]}"
    assert settings.engine.tensor_parallel_size * settings.server.data_parallel_size == int(found[2])
    assert settings.notices == ()
