"""The documentation site: its navigation names every page, and it builds without a warning."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT

DOCS = ROOT / "docs"
UNLISTED = ["decisions/template.md"]  # for those who write a decision, not for readers


def pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(each)


def test_the_navigation_names_every_page_once() -> None:
    named = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    assert sorted([*named, *UNLISTED]) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_first_level_of_the_navigation_is_short() -> None:
    assert len(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]) <= 12


def test_the_index_of_decisions_names_each() -> None:
    index = (DOCS / "decisions" / "index.md").read_text("utf-8")
    for page in sorted((DOCS / "decisions").glob("0*.md")):
        assert f"]({page.name})" in index, page.name


@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="needs the extra docs")
def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    built = tmp_path / "site"
    for page in DOCS.rglob("*.md"):
        assert (built / page.relative_to(DOCS).with_suffix(".html")).exists(), page
    home = (built / "index.html").read_text("utf-8")
    assert "fonts.googleapis" not in home
    for tag in ('<script src="http', '<link rel="stylesheet" href="http'):
        assert tag not in home
