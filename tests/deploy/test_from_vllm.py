"""docs/how-to/from-vllm.md: flags are treated as it says, and its tables are those of the list of names."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from chorale.api.operations import OPERATIONS
from tests.deploy.files import load_script
from tests.deploy.test_vllm_names import merged
from tests.support import ROOT

PAGE = (ROOT / "docs" / "how-to" / "from-vllm.md").read_text("utf-8")


def rows(name: str) -> list[list[str]]:
    """Returns the cells of the rows of a marked table."""
    [part] = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", PAGE, re.DOTALL)
    lines = part.splitlines()[2:]
    assert lines
    return [[cell.strip().strip("`") for cell in line.strip("| ").split("|")] for line in lines]


@pytest.mark.parametrize("row", rows("guide"), ids=lambda row: row[0][:60])
def test_a_flag_is_treated_as_the_page_says(row: list[str], tmp_path: Path) -> None:
    flags, expected = row[0], row[1]
    if flags == "--config recipe.yaml":
        (tmp_path / "recipe.yaml").write_text("max-num-seqs: 2\n")
        flags = f"--config {tmp_path}/recipe.yaml"
    name, _, value = flags.partition(" ")
    arguments = [name, value] if value.startswith("{") else shlex.split(flags)
    if value.startswith("{"):
        json.loads(value)
    model = [] if name == "--model" else ["openai/gpt-oss-120b"]
    assert merged([*model, *arguments], {}) == expected


def test_each_flag_of_the_guides_is_in_one_row() -> None:
    named = [row[0] for row in rows("guide")]
    assert len(named) == len(set(named))
    assert {row[1] for row in rows("guide")} == {"acts", "not needed", "no effect", "refused"}


@pytest.mark.parametrize("name", ["how-to/from-vllm.md", "reference/vllm-names.md"])
def test_the_generated_tables_match_the_list_of_names(name: str) -> None:
    page = (ROOT / "docs" / name).read_text("utf-8")
    assert load_script("vllm_page").render(name, page) == page, "run: python scripts/vllm_page.py"


def test_what_only_chorale_has_is_served() -> None:
    served = {each.path for each in OPERATIONS}
    ours = re.search(r"^Only in Chorale: (.*?)\. Fields of", PAGE, re.MULTILINE | re.DOTALL)
    assert ours
    for path in ours[1].split("`")[1::2]:
        assert path.split()[-1] in served, path
