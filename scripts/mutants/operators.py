"""The mutants of a source file: small edits of its text, each at one node of its syntax tree.

Only edits that a reviewer would call a fault are made. Left alone: docstrings and other strings, annotations,
decorators, ``__all__``, imports, log calls, and code for type checkers only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGGERS = ("log", "logger", "logging", "warnings")


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces ``source[start:end]``, which begins on ``line``, by ``text``."""

    line: int
    last_line: int
    start: int
    end: int
    text: str
    at_import: bool  # the code runs when the module is imported, before any test

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


class Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.source = source
        self.edits: list[Edit] = []
        self._depth = 0  # number of functions around the node
        # Column offsets of the syntax tree count UTF-8 bytes.
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        text = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(text)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        start, end = self.span(node)
        self._add(node, start, end, text)

    def _add(self, node: ast.expr | ast.stmt, start: int, end: int, text: str) -> None:
        last = node.end_lineno or node.lineno
        edit = Edit(node.lineno, last, start, end, text, self._depth == 0)
        if edit.apply(self.source) != self.source and _compiles(edit.apply(self.source)):
            self.edits.append(edit)

    def between(self, node: ast.expr | ast.stmt, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replaces the operator ``old`` between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.source.find(old, start, end)
        if at >= 0:
            self._add(node, at, at + len(old), new)

    # Nodes that are skipped

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(each, ast.Name) and each.id == "__all__" for each in node.targets):
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        self.replace(node.test, "True")
        self.replace(node.test, "False")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self._depth += 1
        for statement in node.body:
            self.visit(statement)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    # Nodes that are changed

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(call, ast.Call) or ast.unparse(call).split(".")[0] in LOGGERS:
            return
        self.replace(node, "pass")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self.between(node, left, right, *COMPARISONS[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(node, left, right, old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        swap = ARITHMETIC.get(type(node.op))
        if swap is not None and not _is_type(node):
            self.between(node, node.left, node.right, *swap)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        swap = ARITHMETIC.get(type(node.op))
        if swap is not None:
            self.between(node, node.target, node.value, f"{swap[0]}=", f"{swap[1]}=")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.replace(node, f"bool({ast.get_source_segment(self.source, node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self.replace(node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.replace(node, repr(node.value * 2 + 1))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in CALLS:
            self.replace(node.func, CALLS[node.func.id])
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self.replace(node.value, "None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self.replace(node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.replace(node, "break")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.replace(node.test, f"not ({ast.get_source_segment(self.source, node.test)})")
        self.generic_visit(node)


def edits_of(source: str) -> Iterator[Edit]:
    finder = Finder(source)
    finder.visit(ast.parse(source))
    seen: set[str] = set()
    for edit in finder.edits:
        mutated = edit.apply(source)
        if mutated not in seen:
            seen.add(mutated)
            yield edit


def _is_type(node: ast.BinOp) -> bool:
    """Returns whether ``node`` is a union of types, such as ``str | None``."""
    parts = (node.left, node.right)
    return isinstance(node.op, ast.BitOr) and any(
        (isinstance(each, ast.Constant) and each.value is None)
        or (
            isinstance(each, ast.Name) and each.id in ("str", "int", "float", "bool", "bytes", "dict", "list")
        )
        for each in parts
    )


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True
