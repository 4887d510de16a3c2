"""Draw docs/images/speculation.svg from docs/data/speculation.json. With --check: compare.

The duration of a step with drafts does not depend on how many are accepted, so the gain is a straight line:
the acceptance length times the duration of a step without drafts, divided by that of a step with drafts. The
picture follows the reader's light or dark mode.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
DATA, PICTURE = ROOT / "docs" / "data" / "speculation.json", ROOT / "docs" / "images" / "speculation.svg"
WIDTH, TOP, HEIGHT, PANEL, GAP, LEFT = 860, 84, 220, 300, 120, 56
MOST_GAIN = 3.0
COLOURS = ("one", "two", "three")
STYLE = """
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


def render(data: dict[str, Any]) -> str:
    parts = [_text(20, 30, data["title"], "title")]
    for number, model in enumerate(data["models"]):
        parts += _panel(LEFT + number * (PANEL + GAP), model, data["drafts"] + 1)
    y = TOP + HEIGHT + 56
    for line in textwrap.wrap(data["note"], 140):
        parts.append(_text(20, y, line, "small"))
        y += 16
    body = "\n".join(f"  {part}" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img"\n'
        f'     width="{WIDTH}" height="{y}">\n'
        f"  <title>{escape(data['title'])}</title>\n  <style>{STYLE}  </style>\n"
        f'  <rect class="ground" width="{WIDTH}" height="{y}" rx="8"/>\n{body}\n</svg>\n'
    )


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


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{name}>{escape(text)}</text>'


def main() -> int:
    picture = render(json.loads(DATA.read_text("utf-8")))
    if "--check" in sys.argv:
        if PICTURE.read_text("utf-8") == picture:
            return 0
        print(f"{PICTURE.name} does not match {DATA.name}; run: python scripts/speculation_chart.py")
        return 1
    PICTURE.write_text(picture, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
