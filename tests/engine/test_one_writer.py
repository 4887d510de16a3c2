"""One writer per state: only their own methods change what ``EngineState`` and ``RowTable`` hold."""

from __future__ import annotations

import ast
from pathlib import Path

import chorale.engine
from chorale.engine.engine_state import EngineState
from chorale.engine.row_table import RowTable
from chorale.engine.types import EngineLimits

ENGINE = Path(chorale.engine.__file__).parent
OWNERS = {"engine_state.py", "row_table.py"}
SHARED = {"limits", "cache", "rows", "emit", "sequences"}  # parts, and names that other classes have too
CHANGES = {"append", "appendleft", "pop", "popleft", "popitem", "clear", "remove", "extend", "update"}


def owned_names() -> set[str]:
    state = EngineState(EngineLimits(8, 4, 2, 8, 16))
    return (set(vars(state)) | set(RowTable.__slots__)) - SHARED


def written(node: ast.AST) -> list[ast.expr]:
    """The expressions that a statement assigns to, or that a call changes in place."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        targets = [node.func.value]
    else:
        return []
    return [target.value if isinstance(target, ast.Subscript) else target for target in targets]


def is_foreign(target: ast.expr, owned: set[str]) -> bool:
    """Whether it is an owned attribute of another object than ``self``."""
    if not isinstance(target, ast.Attribute) or target.attr not in owned:
        return False
    return not (isinstance(target.value, ast.Name) and target.value.id == "self")


def test_only_the_owning_modules_write_engine_state() -> None:
    owned, found = owned_names(), []
    assert {"in_flight", "decoding", "_outbox", "_last_committed_step", "computed"} <= owned
    for path in sorted(ENGINE.rglob("*.py")):
        if path.name in OWNERS:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            found += [f"{path.name}:{node.lineno}" for each in written(node) if is_foreign(each, owned)]
    assert found == []
