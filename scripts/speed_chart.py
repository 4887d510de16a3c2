"""Draw docs/images/speed.svg from docs/data/speed.json: python scripts/speed_chart.py [--check].

Each pair of bars is scaled to the other engine's speed, because the cases differ by a factor of a hundred;
the numbers next to the bars are tokens per second. The picture follows the reader's light or dark mode.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
DATA, PICTURE = ROOT / "docs" / "data" / "speed.json", ROOT / "docs" / "images" / "speed.svg"
WIDTH, LEFT, UNIT, BAR, ROW, GROUP = 860, 190, 235, 12, 38, 34
STYLE = """
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


def render(data: dict[str, Any]) -> str:
    parts = [_text(20, 30, data["title"], "title"), *_legend(data["peer"])]
    y = 72
    for group in data["groups"]:
        parts.append(_text(20, y + 4, group["name"], "group"))
        y += GROUP - 12
        for case in group["cases"]:
            parts += _case(y, case)
            y += ROW
        y += GROUP - 16
    for line in textwrap.wrap(data["note"], 140):
        parts.append(_text(20, y, line, "small"))
        y += 16
    body = "\n".join(f"  {part}" for part in parts)
    title = escape(f"{data['title']}: Chorale and {data['peer']}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img"\n'
        f'     width="{WIDTH}" height="{y}">\n'
        f"  <title>{title}</title>\n  <style>{STYLE}  </style>\n"
        f'  <rect class="ground" width="{WIDTH}" height="{y}" rx="8"/>\n{body}\n</svg>\n'
    )


def _legend(peer: str) -> list[str]:
    return [
        f'<rect class="ours" x="560" y="19" width="{BAR}" height="{BAR}" rx="2"/>', _text(578, 30, "Chorale"),
        f'<rect class="peer" x="650" y="19" width="{BAR}" height="{BAR}" rx="2"/>', _text(668, 30, peer),
    ]  # fmt: skip


def _case(y: int, case: dict[str, Any]) -> list[str]:
    gain = case["chorale"] / case["peer"]
    ours = round(UNIT * gain)
    return [
        _text(LEFT - 10, y + 17, case["label"], "label"),
        f'<rect class="ours" x="{LEFT}" y="{y}" width="{ours}" height="{BAR}" rx="2"/>',
        _text(LEFT + ours + 8, y + 11, f"{case['chorale']:,}"),
        _text(LEFT + ours + 64, y + 11, f"{gain:.2f} ×", "gain"),
        f'<rect class="peer" x="{LEFT}" y="{y + BAR + 2}" width="{UNIT}" height="{BAR}" rx="2"/>',
        _text(LEFT + UNIT + 8, y + BAR + 13, f"{case['peer']:,}"),
    ]


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{name}>{escape(text)}</text>'


def main() -> int:
    picture = render(json.loads(DATA.read_text("utf-8")))
    if "--check" in sys.argv:
        if PICTURE.read_text("utf-8") == picture:
            return 0
        print(f"{PICTURE.name} does not match {DATA.name}; run: python scripts/speed_chart.py")
        return 1
    PICTURE.write_text(picture, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
