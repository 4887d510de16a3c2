"""Docs that are generated are current, and what the docs name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.files import load_script
from tests.support import ROOT

# All but the changelog and the laboratory notes, which name files of their time.
PAGES = [
    *(page for page in sorted(ROOT.glob("*.md")) if page.name != "CHANGELOG.md"),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "lab"),
    ROOT / "examples" / "README.md",
]


def test_the_api_pages_are_what_the_code_says() -> None:
    module = load_script("api_docs")
    for name in module.TABLES:
        page = (ROOT / "docs" / "reference" / name).read_text("utf-8")
        assert module.render(name, page) == page, "run: python scripts/api_docs.py"


def test_the_page_of_metrics_names_each_of_chorale() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    named = set(re.findall(r"`(chorale:\w+?)(?:_total)?`", page))
    sources = (path.read_text("utf-8") for path in (ROOT / "chorale").rglob("*.py"))
    found = {name for source in sources for name in re.findall(r'"(chorale:\w+)"', source)}
    assert len(found) > 20
    assert found - {"chorale:engine"} <= named  # the namespace of chorale:engine_process_*


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_the_docs_name_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    named = re.findall(
        r"`((?:chorale|tests|benchmarks|scripts|docs|examples|training|deploy)/[\w./-]+)`", text
    )
    named += re.findall(r"\]\((?!http)([\w./-]+)(?:#[\w-]+)?\)", text)
    for name in named:
        assert (ROOT / name).exists() or (page.parent / name).exists(), f"{page.name} names {name}"
    for module in re.findall(r"python -m ((?:benchmarks|tests|training)\.[\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), f"{page.name} names {module}"
    for script in re.findall(r"python ((?:\w+/)*\w+\.py)", text):
        assert (ROOT / script).exists(), f"{page.name} names {script}"


GUIDES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs" / "explanation" / "architecture.md",
    ROOT / "docs" / "reference" / "glossary.md",
]


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.name)
def test_what_a_guide_says_is_in_a_file_is_there(page: Path) -> None:
    """Names of files below ``chorale``, and functions beside them: "`a/b.py`: `f`" and "`C.f` (`a/b.py`)"."""
    text = page.read_text("utf-8")
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.py)`", text):
        assert (ROOT / name).exists() or (ROOT / "chorale" / name).exists(), f"{page.name} names {name}"
    pairs = re.findall(r"`([\w./]+/\w+\.py)`:\s+`([\w.]+)`", text)
    pairs += [(file, name) for name, file in re.findall(r"`([\w.]+)`\s+\(`([\w./]+/\w+\.py)`\)", text)]
    pairs += re.findall(r"`([\w./]+/\w+\.py)`, `([A-Z]\w+)`", text)
    for file, name in pairs:
        path = ROOT / "chorale" / file
        source = (path if path.exists() else ROOT / file).read_text("utf-8")
        owner, _, function = name.rpartition(".")
        for part in filter(None, (owner, function)):
            assert re.search(rf"\b{part}\b", source), f"{page.name}: {part} is not in {file}"


def test_every_package_has_its_row_in_the_table_of_tests() -> None:
    """CONTRIBUTING.md: ``make mutants`` reads the table too, and takes the longest path that matches."""
    part = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("<!-- tests -->")[1]
    found = re.findall(r"^\| `(chorale/[\w/.]+)` \|(.+)\|$", part, re.MULTILINE)
    rows = dict(found)
    assert len(rows) == len(found), "a path has two rows"
    for path, tests in rows.items():
        assert (ROOT / path).exists(), path
        assert re.findall(r"`(tests/[\w/.]+)`", tests), path
    for package in sorted((ROOT / "chorale").glob("*/__init__.py")):
        assert f"chorale/{package.parent.name}/" in rows


def test_the_reading_path_is_short() -> None:
    """CONTRIBUTING.md names its files in order, and the most lines that they have together."""
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    part = guide.partition("<!-- reading path -->")[2].partition("<!-- /reading path -->")[0]
    files = re.findall(r"^\| \d+ \| `([\w/.]+)` \|", part, re.MULTILINE)
    assert len(files) == part.count("\n| ") - 1  # less the table's head
    [most] = re.findall(r"at most ([\d,]+) lines", guide)
    assert most == "5,000"
    lines = {file: len((ROOT / file).read_text("utf-8").splitlines()) for file in files}
    assert sum(lines.values()) <= 5000, lines
