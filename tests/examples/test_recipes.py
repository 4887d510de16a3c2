"""The files of examples/recipes: each is read, and uses as many GPUs as its name says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chorale.cli.options.settings import merge
from tests.support import ROOT

RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_uses_the_gpus_of_its_name(path: Path) -> None:
    found = re.match(r"(gpt-oss-\d+b)-(\d)-gpu", path.name)
    assert found is not None
    settings = merge(["--config", str(path)], {})
    assert settings.engine.model == f"openai/{found[1]}"
    assert settings.engine.tensor_parallel_size * settings.server.data_parallel_size == int(found[2])
    assert settings.notices == ()
