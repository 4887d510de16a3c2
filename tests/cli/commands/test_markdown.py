"""``chorale chat`` renders Markdown on a terminal, while it arrives."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest
from rich.console import Console

from chorale.cli.commands.client.markdown import MarkdownWriter, rendered
from chorale.cli.commands.client.terminal import Printer, show

ANSWER = """\
# A title

Some *text* and `code`, 2 * 3 * 4 = 24.

1. First:
   ```python
   x = 1

   y = 2
   ```

   A second paragraph.
2. Second

| a | b |
|---|---|
| 1 | 2 |

Last line with [a link](http://example.com/x).
"""


def printed(*pieces: str) -> str:
    output = io.StringIO()
    writer = MarkdownWriter(Console(file=output, width=60))
    for piece in pieces:
        writer.write(piece)
    writer.close()
    return output.getvalue()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_in_pieces_is_shown_like_the_whole(size: int) -> None:
    whole = io.StringIO()
    Console(file=whole, width=60).print(rendered(ANSWER))
    pieces = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    # Blank lines between blocks may differ.
    assert printed(*pieces).split() == whole.getvalue().split()


def test_a_link_shows_its_address() -> None:
    assert "http://example.com/x" in printed(ANSWER)


def test_latex_is_kept() -> None:
    formula = r"\(a_1 * b_1 * c\) and \[\frac{1}{2} \\, \{x\}\]"
    assert printed(formula).strip() == formula


@pytest.mark.parametrize("plain", [True, False])
def test_only_a_terminal_gets_rendered_text(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the asterisks of bold text are gone unless ``--plain`` is given."""
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(theirs, "w", closefd=True) as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        show([{"choices": [{"delta": {"content": "**bold**"}}]}], Printer(plain))
        shown = ""
        while "bold" not in shown:
            shown += os.read(ours, 10_000).decode()
    os.close(ours)
    assert ("**bold**" in shown) == plain
    assert "bold" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
