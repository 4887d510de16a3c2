"""Finds the lines of the product that a change touched, and the functions around them."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

_HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@")


def changed_lines(root: Path, since: str, package: str) -> dict[str, set[int]]:
    """Returns by file the lines of ``package`` that differ between commit ``since`` and the working tree.

    A deleted line counts as a change of the line before it.
    """
    command = ["git", "diff", "--unified=0", "--no-color", "--no-ext-diff", since, "--", package]
    diff = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    lines: dict[str, set[int]] = {}
    file = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ ").removeprefix("b/")
        elif (hunk := _HUNK.match(line)) and file.endswith(".py"):
            first, count = int(hunk[1]), int(hunk[2] or "1")
            lines.setdefault(file, set()).update(range(first, first + max(count, 1)))
    return lines


def widened(source: str, lines: set[int]) -> set[int]:
    """Returns ``lines`` and all lines of the functions that contain one of them."""
    wide = set(lines)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if not lines.isdisjoint(body):
                wide.update(body)
    return wide


def lines_of(source: str, function: str) -> set[int]:
    """Returns the lines of functions and classes called ``function``. Raises ``SystemExit`` without any."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == function:
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    if not found:
        raise SystemExit(f"no function or class is called {function}")
    return found
