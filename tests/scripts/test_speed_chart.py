"""The speed chart of the README is what its data say, and its data are what the docs say."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.deploy.files import load_script
from tests.support import ROOT

DATA: dict[str, Any] = json.loads((ROOT / "docs" / "data" / "speed.json").read_text("utf-8"))
CASES = [(group["name"], case) for group in DATA["groups"] for case in group["cases"]]


def test_the_picture_is_drawn_from_the_data() -> None:
    drawn = (ROOT / "docs" / "images" / "speed.svg").read_text("utf-8")
    assert load_script("charts").speed(DATA) == drawn, "run: python scripts/charts.py"
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
