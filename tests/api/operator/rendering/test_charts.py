"""The axes of the charts, and what a screen reader says of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.operator.rendering.conftest import Browser


def drawn(browser: Browser, values: list[float | None], **options: Any) -> tuple[list[str], list[str], str]:
    """Returns the texts at the y axis, those at the x axis, and the description."""
    points = [{"time": 2 * (place + 1 - len(values)), "value": value} for place, value in enumerate(values)]
    series = json.dumps([{"name": "median", "points": points}])
    browser.value(f"drawChart(box, {series}, {json.dumps(options)})")
    texts = browser.value("[...box.querySelectorAll('text')].map(node => node.textContent)")
    at = texts.index("now")
    return texts[:at], texts[at:], browser.value("box.querySelector('[role=img]').getAttribute('aria-label')")


@pytest.mark.parametrize(
    ("values", "options", "axis"),
    [
        ([3.0, 100.0], {"max": 100}, ["0 %", "25 %", "50 %", "75 %", "100 %"]),
        ([0.0, 1.0], {"integer": True}, ["0", "1", "2"]),
        ([0.0], {"integer": True}, ["0", "1", "2", "3", "4"]),
        ([None, 1830.0], {}, ["0", "500", "1,000", "1,500", "2,000"]),
        ([0.07, 0.3], {"unit": "ms"}, ["0 ms", "0.1 ms", "0.2 ms", "0.3 ms"]),
    ],
)
def test_the_value_axis_has_round_numbers(
    browser: Browser, values: list[float | None], options: dict[str, Any], axis: list[str]
) -> None:
    assert drawn(browser, values, **options)[0] == axis


def test_the_time_axis_spans_what_is_shown(browser: Browser) -> None:
    assert drawn(browser, [1.0])[1][-1] == "1 min ago"
    assert drawn(browser, [1.0] * 151)[1][-1] == "5 min ago"


def test_a_chart_is_described_and_its_gaps_are_not_drawn(browser: Browser) -> None:
    values = [1.0, 2.0, None, 5.0, 4.0]
    assert drawn(browser, values, title="Times", unit="ms")[2] == (
        "Times. median: 4 ms now, 5 ms at most; in the last 1 min."
    )
    path = browser.value(
        "box.querySelector('path.chart-line-0[d*=L][d*=M]:not([d=\"M1 4H23\"])').getAttribute('d')"
    )
    assert path.count("M") == 2
