"""An HTML page from result files: tables and inline SVG plots, with no scripts and no external resources."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chorale.errors import ConfigError
from chorale.machine.folders import write_whole

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #6b7280; --line: #d7dbe0; --fill: #2f6fde;
  --page: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa1ab; --line: #363c45; --fill: #7aa5f5; --page: #14171b }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 960px; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 2rem; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
th { color: var(--soft); font-weight: 500 }
svg { width: 100%; height: auto; margin: .5rem 0 2rem }
svg text { fill: var(--soft); font-size: 12px }
.axis { stroke: var(--line) } .dot, .bar { fill: var(--fill) }
.curve { stroke: var(--fill); fill: none; stroke-width: 2 }
"""


# Required keys by kind of result. Percentiles are optional: the caller chooses which are recorded.
NEEDED = {
    "serve": ("completed", "output_throughput", "median_ttft_ms", "median_tpot_ms"),
    "throughput": (),
    "latency": (),
    "startup": (),
    "kernels": ("kernels",),
}


@dataclass(frozen=True, slots=True)
class Series:
    """One plot. ``points``: (x, y, label)."""

    title: str
    x: str
    y: str
    points: tuple[tuple[float, float, str], ...]


def write_report(results: Sequence[Path], out: Path) -> None:
    """Writes the page. Raises ``ConfigError`` for a file that is not a result of ``chorale bench``."""
    write_whole(out, page([read(path) for path in results]))


def read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text("utf-8"))
        if not isinstance(result, dict) or "kind" not in result:
            raise ValueError("'kind' is missing")
        if result["kind"] not in NEEDED:
            raise ValueError(f"kind {result['kind']!r} is not one of {', '.join(NEEDED)}")
        missing = [name for name in NEEDED[result["kind"]] if name not in result]
        if missing:
            raise ValueError(f"{missing[0]!r} is missing")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a result of chorale bench ({error})") from error
    return result


def page(results: Sequence[dict[str, Any]]) -> str:
    """Returns the page: the machine of the first result, then all results grouped by kind."""
    machine: dict[str, Any] = next((each["machine"] for each in results if each.get("machine")), {})
    pieces = [f"<h1>Chorale benchmarks</h1>{_machine(machine)}"]
    sections = {"serve": _serve, "kernels": _kernels}
    for kind in NEEDED:
        if some := [each for each in results if each["kind"] == kind]:
            pieces.append(f"<h2>{kind}</h2>" + sections.get(kind, _plain)(some))
    head = "<!doctype html><html lang=en><meta charset=utf-8><title>Chorale benchmarks</title>"
    return f"{head}<style>{_STYLE}</style>" + "".join(pieces) + "</html>\n"


def _machine(machine: dict[str, Any]) -> str:
    gpus = (
        ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in machine.get("gpus", [])) or "no GPU"
    )
    rows = [("GPU", gpus)] + [(name, machine[name]) for name in machine if name != "gpus"]
    return _table(("machine", ""), rows)


def _serve(results: Sequence[dict[str, Any]]) -> str:
    ordered = sorted(results, key=lambda each: each.get("max_concurrency") or math.inf)
    rows = [
        (
            _label(each), each["completed"], each["output_throughput"], each["median_ttft_ms"],
            each.get("p99_ttft_ms", ""), each["median_tpot_ms"],
        )
        for each in ordered
    ]  # fmt: skip
    titles = ("load", "requests", "output tok/s", "median TTFT ms", "P99 TTFT ms", "median TPOT ms")
    curves = [
        Series("Throughput against latency", "median TPOT, ms", "output tokens a second", tuple(
            (each["median_tpot_ms"], each["output_throughput"], _label(each)) for each in ordered)),
        Series("Time to first token", "output tokens a second", "median TTFT, ms", tuple(
            (each["output_throughput"], each["median_ttft_ms"], _label(each)) for each in ordered)),
    ]  # fmt: skip
    return _table(titles, rows) + "".join(_plot(curve) for curve in curves)


def _label(result: dict[str, Any]) -> str:
    limit = result.get("max_concurrency")
    return f"{limit} at once" if limit else f"{result.get('request_rate')} a second"


def _plain(results: Sequence[dict[str, Any]]) -> str:
    # Results may have different keys, for example without cold starts.
    found = {name: value for each in results for name, value in each.items()}
    names = [name for name, value in found.items() if isinstance(value, int | float | str) and name != "kind"]
    titles = [name.replace("_", " ") for name in names]
    return _table(titles, [[each.get(name, "") for name in names] for each in results])


def _kernels(results: Sequence[dict[str, Any]]) -> str:
    rows = [row for each in results for row in each.get("kernels", [])]
    titles = ("kernel", "case", "microseconds", "GB/s", "TFLOP/s", "share of roofline")
    table = _table(titles, [
        (row["kernel"], row["case"], row["us"], row["gb_s"], row["tflop_s"], f"{row['share']:.0%}")
        for row in rows
    ])  # fmt: skip
    return table + _bars("Share of the roofline", [(f"{r['kernel']} {r['case']}", r["share"]) for r in rows])


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{html.escape(str(title))}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.{2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0}f}"
    return html.escape(f"{value:,}" if isinstance(value, int) else str(value))


def _ticks(most: float) -> list[float]:
    """Returns round numbers from zero to the first that is at least ``most``."""
    rough = most / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    return [step * n for n in range(math.ceil(most / step * 0.999) + 1)]


def _plot(series: Series) -> str:
    """Returns a curve through the points as SVG, with axes from zero."""
    width, height = 900, 320
    left, right, bottom, top = 70, 40, 40, 34
    across = _ticks(max((x for x, _, _ in series.points), default=0.0) or 1.0)
    up = _ticks(max((y for _, y, _ in series.points), default=0.0) or 1.0)

    def locate(x: float, y: float) -> tuple[float, float]:
        return (
            left + x / across[-1] * (width - left - right),
            height - bottom - y / up[-1] * (height - bottom - top),
        )

    marks = []
    for x in across:
        at_x, base = locate(x, 0)
        marks.append(f"<text x={at_x:.1f} y={base + 18:.1f} text-anchor=middle>{x:,.10g}</text>")
    for y in up:
        _, at_y = locate(0, y)
        marks.append(f"<line class=axis x1={left} x2={width - right} y1={at_y:.1f} y2={at_y:.1f} />")
        marks.append(f"<text x={left - 8} y={at_y + 4:.1f} text-anchor=end>{y:,.10g}</text>")
    located = [(*locate(x, y), label) for x, y, label in series.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in located)
    dots = "".join(
        f"<circle class=dot cx={x:.1f} cy={y:.1f} r=4 />{_name(x, y, label, left)}" for x, y, label in located
    )
    words = html.escape(f"{series.title}: {series.y} by {series.x}")
    curve = f'<polyline class=curve points="{line}" />'
    inner = f"<text x={left} y=14>{words}</text>" + "".join(marks) + curve + dots
    return f'<svg viewBox="0 0 {width} {height}">{inner}</svg>'


def _name(x: float, y: float, label: str, left: int) -> str:
    """Returns a point's label as SVG, to its upper left (clear of a rising curve), or right near the axis."""
    room = x - 6 - 7 * len(label) > left
    at, above, anchor = (x - 6, 8, "end") if room else (x, 18, "start")
    return f"<text x={at:.1f} y={y - above:.1f} text-anchor={anchor}>{html.escape(label)}</text>"


def _bars(title: str, bars: Sequence[tuple[str, float]]) -> str:
    height = 24 * len(bars) + 30
    rows = "".join(
        f"<text x=250 y={24 * n + 44} text-anchor=end>{html.escape(name)}</text>"
        f"<rect class=bar x=260 y={24 * n + 32} width={min(value, 1.0) * 560:.1f} height=16 />"
        f"<text x={266 + min(value, 1.0) * 560:.1f} y={24 * n + 44}>{value:.0%}</text>"
        for n, (name, value) in enumerate(bars)
    )
    return f'<svg viewBox="0 0 900 {height}"><text x=0 y=14>{html.escape(title)}</text>{rows}</svg>'
