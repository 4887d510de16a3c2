"""Writes the tables of how-to/from-vllm.md and reference/vllm-names.md from the list of vLLM's names.

    python scripts/vllm_page.py           rewrites the pages
    python scripts/vllm_page.py --check   exits 1 if one would change

A table is between ``<!-- NAME -->`` and ``<!-- /NAME -->``.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from chorale.config.options.vllm_flags import read_names

DOCS = Path(__file__).resolve().parents[1] / "docs"
TREATMENTS = ("acts", "not needed", "no effect", "refused")
# Words for the counts -> kinds.
KINDS = {
    "flags of `vllm serve`": ("flag",),
    "environment variables": ("env",),
    "endpoints": ("endpoint",),
    "request fields": tuple(
        f"field {name}"
        for name in ("chat", "completions", "responses", "messages", "generate", "tokenize", "detokenize")
    ),
    "methods of `LLM`": ("LLM",),
    "fields of `SamplingParams`": ("SamplingParams",),
    "metrics": ("metric",),
    "flags of `vllm bench`": tuple(
        f"bench {name}"
        for name in ("serve", "throughput", "latency", "startup", "forward", "mm-processor", "sweep")
    ),
}


def counts() -> str:
    """Returns a table of the numbers of names that the newest version of vLLM has."""
    rows = ["| | acts | not needed | no effect | refused | without treatment |", "|---|---|---|---|---|---|"]
    for words, kinds in KINDS.items():
        lines = [line for line in read_names(*kinds) if "gone" not in line.form and line.name[-1] != "*"]
        found = Counter(line.treatment for line in lines)
        others = len(lines) - sum(found[each] for each in TREATMENTS)
        rows.append(f"| {words} | {' | '.join(str(found[each]) for each in TREATMENTS)} | {others} |")
    return "\n".join(rows) + "\n"


def grouped(*kinds: str, treatments: Sequence[str] = TREATMENTS) -> str:
    """Returns a table of names, with a row for each treatment and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    lines = [line for line in read_names(*kinds) if line.treatment in treatments]
    for line in sorted(lines, key=lambda line: TREATMENTS.index(line.treatment)):
        if "silent" not in line.form:
            dashes = "--" if line.kind == "flag" or line.kind.startswith("bench") else ""
            groups.setdefault((line.treatment, line.reason), []).append(f"`{dashes}{line.name}`")
    rows = [
        f"| {treatment} | {reason} | {', '.join(names)} |" for (treatment, reason), names in groups.items()
    ]
    return "\n".join(["| here | reason | names |", "|---|---|---|", *rows]) + "\n"


REFUSED = partial(grouped, treatments=["refused"])
# Page -> table -> what writes it.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "how-to/from-vllm.md": {
        "counts": counts,
        "refused": lambda: REFUSED("flag"),
        "endpoints": lambda: REFUSED("endpoint"),
        "python": lambda: REFUSED("LLM"),
    },
    "reference/vllm-names.md": {
        kind: partial(grouped, kind)
        for kind in (
            *("flag", "env", "endpoint", "metric", "LLM", "SamplingParams"),
            *(f"bench {name}" for name in ("serve", "throughput", "latency", "startup")),
        )
    },
}


def render(name: str, page: str) -> str:
    for table, write in TABLES[name].items():
        marks = re.compile(rf"(?<=<!-- {table} -->\n).*?(?=<!-- /{table} -->)", re.DOTALL)
        page, found = marks.subn(write().replace("\\", "\\\\"), page)
        if found != 1:
            raise SystemExit(f"{name}: {found} tables are named {table!r}")
    return page


def main() -> int:
    changed = False
    for name in TABLES:
        page = (DOCS / name).read_text("utf-8")
        made = render(name, page)
        changed = changed or made != page
        if "--check" not in sys.argv[1:]:
            (DOCS / name).write_text(made, "utf-8")
    return int(changed and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
