"""The picture of docs/speculation.md is drawn from its data, which are those of the page's table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_picture_is_drawn_from_the_data_of_the_page() -> None:
    spec = importlib.util.spec_from_file_location("chart", ROOT / "scripts" / "speculation_chart.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    data = json.loads(script.DATA.read_text("utf-8"))
    drawn = script.PICTURE.read_text("utf-8")
    assert script.render(data) == drawn, "run: python scripts/speculation_chart.py"
    page = (ROOT / "docs" / "speculation.md").read_text("utf-8")
    for model in data["models"]:
        for each in model["rows"]:
            row = f"| {model['name'].removeprefix('gpt-oss-')}, {each['rows']} | {each['off_ms']:.2f} |"
            assert any(
                line.startswith(row) and f"| {each['step_ms']:.2f} |" in line for line in page.splitlines()
            )
