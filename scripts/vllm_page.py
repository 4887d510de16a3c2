"""Writes the table of all flags in docs/how-to/from-vllm.md: `python scripts/vllm_page.py [--check]`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from chorale.config.options.vllm_flags import KNOWN_FLAGS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "from-vllm.md"
MARKS = re.compile(r"(?<=<!-- all -->\n).*?(?=<!-- /all -->)", re.DOTALL)


def table() -> str:
    """Returns the table, with a row for each treatment and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for flag in KNOWN_FLAGS:
        groups.setdefault((flag.effect, flag.note), []).append(f"`--{flag.name}`")
    rows = [f"| {effect} | {note} | {', '.join(names)} |" for (effect, note), names in groups.items()]
    return "\n".join(["| here | reason | flags |", "|---|---|---|", *rows]) + "\n"


def render(page: str) -> str:
    made = table()
    return MARKS.sub(lambda _: made, page)


def main() -> int:
    page = PAGE.read_text("utf-8")
    if "--check" in sys.argv[1:]:
        return int(render(page) != page)
    PAGE.write_text(render(page), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
