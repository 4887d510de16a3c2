"""docs/how-to/from-vllm.md: each flag, variable, endpoint and metric in its tables is treated as it says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from chorale.api.telemetry.engine_metrics import COUNTER, ENGINE_METRICS
from chorale.api.telemetry.metric_names import COUNTERS, HISTOGRAMS
from chorale.config.options.settings import merge
from chorale.errors import ConfigError
from tests.deploy.files import load_script
from tests.support import ROOT

PAGE = (ROOT / "docs" / "how-to" / "from-vllm.md").read_text("utf-8")


def rows(name: str) -> list[list[str]]:
    """Returns the cells of the rows of a marked table."""
    [part] = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", PAGE, re.DOTALL)
    lines = part.splitlines()[2:]
    assert lines
    return [[cell.strip().strip("`") for cell in line.strip("| ").split("|")] for line in lines]


def treatment(arguments: list[str], environment: dict[str, str]) -> str:
    try:
        notices = merge(arguments, environment).notices
    except ConfigError as error:
        return "refused" if "is not supported" in str(error) else str(error)
    words = {
        "not needed": "not needed",
        "has no effect": "no effect",
        "is not read by": "not read",
        "not read by": "not read",
        "visible in process lists; prefer": "acts",
    }
    found = {kind for notice in notices for text, kind in words.items() if text in notice}
    assert len(found) <= 1, notices
    assert len(notices) == len(found), notices
    return found.pop() if found else "acts"


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
    assert treatment([*model, *arguments], {}) == expected


def test_each_flag_of_the_guides_is_in_one_row() -> None:
    named = [row[0] for row in rows("guide")]
    assert len(named) == len(set(named))
    assert {row[1] for row in rows("guide")} == {"acts", "not needed", "no effect", "refused"}


def test_the_table_of_all_flags_matches_the_code() -> None:
    assert load_script("vllm_page").render(PAGE) == PAGE, "run: python scripts/vllm_page.py"


@pytest.mark.parametrize("row", rows("variables"), ids=lambda row: row[0])
def test_a_variable_is_treated_as_the_page_says(row: list[str]) -> None:
    values = {
        "VLLM_LOG_STATS_INTERVAL": "5",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_SYSTEM_START_DATE": "2026-01-02",
    }
    found = treatment(["demo"], {row[0]: values.get(row[0], "1")})
    expected = re.split("[,:]", row[1])[0]
    assert {"acts": "read"}.get(found, found) == expected


def test_endpoints_exist_or_not_as_the_page_says() -> None:
    api = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")  # generated from the routes
    served = set(re.findall(r"^\| (?:GET|POST) \| `([^`]+)` \|", api, re.MULTILINE)) | {"/docs"}
    for path, here in rows("endpoints"):
        assert (path in served) != here.startswith("missing"), path
    ours = re.search(r"^Only in Chorale: (.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert ours
    for path in ours[1].split("`")[1::2]:
        assert path.removeprefix("GET ") in served, path


def test_the_page_lists_the_metrics_of_the_server() -> None:
    """The page lists all metrics that this server shares with vLLM, with their types, and no others."""
    types = {f"{name}_total": "counter" for name in COUNTERS} | dict.fromkeys(HISTOGRAMS, "histogram")
    for metric in ENGINE_METRICS:
        types |= {f"{metric.name}_total": "counter"} if metric.kind is COUNTER else {metric.name: "gauge"}
    named = {name: kind.split(",")[0] for name, kind in rows("metrics")}
    assert named == {name: kind for name, kind in types.items() if not name.startswith("chorale:")}
