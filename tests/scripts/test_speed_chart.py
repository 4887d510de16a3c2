"""The speed chart of the README is what its data say, and its data are what the docs say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA: dict[str, Any] = json.loads((ROOT / "docs" / "data" / "speed.json").read_text("utf-8"))
CASES = [(group["name"], case) for group in DATA["groups"] for case in group["cases"]]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("speed_chart", ROOT / "scripts" / "speed_chart.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_drawn_from_the_data(script: ModuleType) -> None:
    drawn = (ROOT / "docs" / "images" / "speed.svg").read_text("utf-8")
    assert script.render(DATA) == drawn, "run: python scripts/speed_chart.py"
    texts = [each.text for each in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    for _, case in CASES:
        assert {f"{case['chorale']:,}", f"{case['peer']:,}"} <= set(texts)


@pytest.mark.parametrize(("model", "case"), CASES, ids=lambda each: str(each)[:40])
def test_the_data_match_the_docs(model: str, case: dict[str, Any]) -> None:
    """Both figures of a case stand in one row of a table of the page that it names, and of the README."""
    for name in (case["page"], "README.md"):
        rows = [
            line
            for line in (ROOT / name).read_text("utf-8").splitlines()
            if line.startswith("|") and f"{case['chorale']:,}" in line and f"{case['peer']:,}" in line
        ]
        assert rows, (
            f"{name} has no row with {case['chorale']:,} and {case['peer']:,} ({model}, {case['label']})"
        )
