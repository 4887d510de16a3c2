"""Shows an answer in Markdown on a terminal while it arrives."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import SegmentLines

_MATH = re.compile(r"\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$", re.DOTALL)


def _math(state: StateInline, silent: bool) -> bool:
    """Keeps LaTeX as it is written: Markdown would take its backslashes, asterisks and underscores away."""
    found = _MATH.match(state.src, state.pos, state.posMax)
    if found is None:
        return False
    if not silent:
        state.push("text", "", 0).content = found[0]
    state.pos = found.end()
    return True


def _parser() -> MarkdownIt:
    parser = MarkdownIt().enable("strikethrough").enable("table")
    parser.inline.ruler.before("escape", "math", _math)
    return parser


PARSER = _parser()


def finished_blocks(text: str) -> tuple[str, str]:
    """Splits ``text`` before its last block, which more text may change."""
    starts = [token.map[0] for token in PARSER.parse(text) if token.level == 0 and token.map]
    lines = text.split("\n")
    last = starts[-1] if starts else 0
    return "".join(line + "\n" for line in lines[:last]), "\n".join(lines[last:])


def rendered(text: str) -> Markdown:
    # An address that is hidden behind a text could mislead, so links show theirs.
    markdown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    markdown.parsed = PARSER.parse(text)
    return markdown


class MarkdownWriter:
    """Prints each block once it is complete, and the end of the block that arrives below them."""

    def __init__(self, console: Console) -> None:
        self._console, self._pending, self._is_first = console, "", True
        self._live = Live(
            get_renderable=self._view, console=console, refresh_per_second=10, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._live.start()

    def write(self, text: str) -> None:
        self._pending += text
        if "\n" in text:
            finished, rest = finished_blocks(self._pending)
            if finished:
                self._pending = rest
                self._print(finished)

    def close(self) -> None:
        rest, self._pending = self._pending, ""
        self._live.stop()
        self._print(rest)

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if not self._is_first:
            self._console.print()
        self._is_first = False
        self._console.print(rendered(text))

    def _view(self) -> SegmentLines:
        """Returns the last lines of the block that arrives: as many as fit on the screen."""
        lines = (
            self._console.render_lines(rendered(self._pending), pad=False) if self._pending.strip() else []
        )
        if lines and not self._is_first:
            lines = [[], *lines]
        return SegmentLines(lines[-max(self._console.height - 2, 1) :], new_lines=True)
