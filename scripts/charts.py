"""Draw docs/images/speed.svg and speculation.svg from docs/data: python scripts/charts.py [--check].

Speed: each pair of bars is scaled to the other engine's speed, because the cases differ by a factor of a
hundred; the numbers next to the bars are tokens per second. Speculation: the duration of a step with drafts
does not depend on how many are accepted, so the gain is a straight line: the acceptance length times the
duration of a step without drafts, divided by that of a step with drafts. The pictures follow the reader's
light or dark mode.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTH = 860
BARS_LEFT, UNIT, BAR, ROW, GROUP = 190, 235, 12, 38, 34
TOP, HEIGHT, PANEL, GAP, LEFT = 84, 220, 300, 120, 56
MOST_GAIN = 3.0
COLOURS = ("one", "two", "three")
SPEED_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
  .title { font-size: 17px; font-weight: 600 } .group { font-weight: 600 } .label { text-anchor: end }
  .small { font-size: 11px; fill: #59636e } .gain { font-weight: 600; fill: #3b5bdb }
  .ours { fill: #3b5bdb } .peer { fill: #adb5bd }
  .ground { fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .gain { fill: #91a7ff }
    .ours { fill: #748ffc } .peer { fill: #5c636b }
    .ground { fill: #0d1117 }
  }
"""
SPECULATION_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
  .title { font-size: 17px; font-weight: 600 } .group { font-weight: 600 }
  .small { font-size: 11px; fill: #59636e } .right { text-anchor: end } .middle { text-anchor: middle }
  .grid { stroke: #d1d9e0 } .even { stroke: #59636e; stroke-dasharray: 4 3 }
  .one { stroke: #3b5bdb } .two { stroke: #0c8599 } .three { stroke: #e8590c }
  .curve { stroke-width: 2.5; fill: none } .ground { fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .grid { stroke: #3d444d } .even { stroke: #9198a1 }
    .one { stroke: #748ffc } .two { stroke: #3bc9db } .three { stroke: #ffa94d } .ground { fill: #0d1117 }
  }
"""


def speed(data: dict[str, Any]) -> str:
    parts = [_text(20, 30, data["title"], "title"), *_legend(data["peer"])]
    y = 72
    for group in data["groups"]:
        parts.append(_text(20, y + 4, group["name"], "group"))
        y += GROUP - 12
        for case in group["cases"]:
            parts += _case(y, case)
            y += ROW
        y += GROUP - 16
    return _picture(f"{data['title']}: Chorale and {data['peer']}", SPEED_STYLE, parts, y, data["note"])


def _legend(peer: str) -> list[str]:
    return [
        f'<rect class="ours" x="560" y="19" width="{BAR}" height="{BAR}" rx="2"/>', _text(578, 30, "Chorale"),
        f'<rect class="peer" x="650" y="19" width="{BAR}" height="{BAR}" rx="2"/>', _text(668, 30, peer),
    ]  # fmt: skip


def _case(y: int, case: dict[str, Any]) -> list[str]:
    gain = case["chorale"] / case["peer"]
    ours = round(UNIT * gain)
    return [
        _text(BARS_LEFT - 10, y + 17, case["label"], "label"),
        f'<rect class="ours" x="{BARS_LEFT}" y="{y}" width="{ours}" height="{BAR}" rx="2"/>',
        _text(BARS_LEFT + ours + 8, y + 11, f"{case['chorale']:,}"),
        _text(BARS_LEFT + ours + 64, y + 11, f"{gain:.2f} ×", "gain"),
        f'<rect class="peer" x="{BARS_LEFT}" y="{y + BAR + 2}" width="{UNIT}" height="{BAR}" rx="2"/>',
        _text(BARS_LEFT + UNIT + 8, y + BAR + 13, f"{case['peer']:,}"),
    ]


def speculation(data: dict[str, Any]) -> str:
    parts = [_text(20, 30, data["title"], "title")]
    for number, model in enumerate(data["models"]):
        parts += _panel(LEFT + number * (PANEL + GAP), model, data["drafts"] + 1)
    return _picture(data["title"], SPECULATION_STYLE, parts, TOP + HEIGHT + 56, data["note"])


def _panel(left: int, model: dict[str, Any], longest: int) -> list[str]:
    parts = [_text(left, TOP - 16, model["name"], "group")]
    for gain in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        y = _height(gain)
        kind = "even" if gain == 1.0 else "grid"
        parts.append(f'<line class="{kind}" x1="{left}" y1="{y}" x2="{left + PANEL}" y2="{y}"/>')
        parts.append(_text(left - 8, y + 4, f"{gain:g} ×", "small right"))
    for length in range(1, longest + 1):
        x = left + _offset(length, longest)
        parts.append(_text(x, TOP + HEIGHT + 18, str(length), "small middle"))
    parts.append(
        _text(left + PANEL // 2, TOP + HEIGHT + 34, "tokens a step (acceptance length)", "small middle")
    )
    labels = []
    for colour, each in zip(COLOURS, model["rows"], strict=True):
        slope = each["off_ms"] / each["step_ms"]
        ends = [(left + _offset(length, longest), _height(length * slope)) for length in (1, longest)]
        (x1, y1), (x2, y2) = ends
        parts.append(f'<path class="curve {colour}" d="M{x1} {y1} L{x2} {y2}"/>')
        labels.append((y2 + 4, f"{each['rows']} {'stream' if each['rows'] == 1 else 'streams'}"))
    lowest = 0
    for y, label in sorted(labels):
        lowest = max(y, lowest + 13)  # labels must not overlap
        parts.append(_text(left + PANEL + 6, lowest, label, "small"))
    return parts


def _offset(length: float, longest: int) -> int:
    return round((length - 1) / (longest - 1) * PANEL)


def _height(gain: float) -> int:
    return TOP + HEIGHT - round(gain / MOST_GAIN * HEIGHT)


def _picture(title: str, style: str, parts: list[str], y: int, note: str) -> str:
    """Returns the picture, with the note from ``y`` on."""
    lines = textwrap.wrap(note, 140)
    parts = [*parts, *(_text(20, y + 16 * number, line, "small") for number, line in enumerate(lines))]
    y += 16 * len(lines)
    body = "\n".join(f"  {part}" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img"\n'
        f'     width="{WIDTH}" height="{y}">\n'
        f"  <title>{escape(title)}</title>\n  <style>{style}  </style>\n"
        f'  <rect class="ground" width="{WIDTH}" height="{y}" rx="8"/>\n{body}\n</svg>\n'
    )


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{name}>{escape(text)}</text>'


def main() -> int:
    stale = 0
    for draw in (speed, speculation):
        picture = DOCS / "images" / f"{draw.__name__}.svg"
        drawn = draw(json.loads((DOCS / "data" / f"{draw.__name__}.json").read_text("utf-8")))
        if "--check" not in sys.argv:
            picture.write_text(drawn, "utf-8")
        elif picture.read_text("utf-8") != drawn:
            print(f"{picture.name} does not match its data; run: python scripts/charts.py")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
