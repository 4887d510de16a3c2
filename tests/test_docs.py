"""Docs that are generated are current, and what the docs name exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_api_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("api_docs", ROOT / "scripts" / "api_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert module.render(page) == page, "run: python scripts/api_docs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_the_docs_name_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    named = re.findall(r"`((?:chorale|tests|benchmarks|scripts|docs|training)/[\w./-]+)`", text)
    named += re.findall(r"\]\((?!http)([\w./-]+)\)", text)
    for name in named:
        assert (ROOT / name).exists() or (page.parent / name).exists(), f"{page.name} names {name}"
