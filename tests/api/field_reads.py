"""Where the fields of a class are read: the loads of every attribute in ``chorale``, and of what.

A field counts as read if some code outside its class loads it from a variable, parameter, attribute or field
that is annotated with the class, or with a class or protocol that declares the field too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import chorale

ROOT = Path(chorale.__file__).parent


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))}


@cache
def nodes() -> dict[type[ast.AST], list[tuple[Path, Any]]]:
    """Every node by its type: one walk takes seconds."""
    found: dict[type[ast.AST], list[tuple[Path, Any]]] = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            found[type(node)].append((path, node))
    return found


def names_in(annotation: ast.AST | None) -> Iterator[str]:
    """The identifiers of an annotation, quoted ones included."""
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


@cache
def holders() -> dict[str, frozenset[tuple[Path | None, str]]]:
    """Class -> what is annotated with it: (file, name) of a variable, (None, name) of a field."""
    found: dict[str, set[tuple[Path | None, str]]] = defaultdict(set)
    returning: dict[str, set[str]] = defaultdict(set)  # function -> the classes that it returns
    for path, node in nodes()[ast.arg]:
        for name in names_in(node.annotation):
            found[name].add((path, node.arg))
    for _, node in nodes()[ast.AnnAssign]:
        for name in names_in(node.annotation):
            found[name].add((None, terminal(node.target)))
    for _, node in nodes()[ast.FunctionDef] + nodes()[ast.AsyncFunctionDef]:
        returning[node.name].update(names_in(node.returns))
        for name in names_in(node.returns):
            found[name].add((None, node.name))  # a property
    fields: dict[str, set[str]] = defaultdict(set)  # field -> the classes that it holds
    for name, places in found.items():
        for path, holder in places:
            if path is None:
                fields[holder].add(name)
    for path, node in nodes()[ast.Assign]:
        if isinstance(node.targets[0], ast.Name):
            for part in set(map(terminal, ast.walk(node.value))):
                for name in {part, *returning.get(part, ()), *fields.get(part, ())}:
                    found[name].add((path, node.targets[0].id))
    return {name: frozenset(places) for name, places in found.items()}


def terminal(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return terminal(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def declared() -> dict[str, frozenset[str]]:
    """Class -> the names that its body declares; classes of ``chorale`` by their bare names."""
    found: dict[str, set[str]] = defaultdict(set)
    for _, node in nodes()[ast.ClassDef]:
        for part in node.body:
            if isinstance(part, ast.AnnAssign):
                found[node.name].add(terminal(part.target))
            elif isinstance(part, ast.FunctionDef):
                found[node.name].add(part.name)
    return {name: frozenset(fields) for name, fields in found.items()}


@cache
def loads() -> dict[str, frozenset[tuple[Path, str]]]:
    """Attribute -> (file, name of what it is loaded from), ``self`` left out."""
    found: dict[str, set[tuple[Path, str]]] = defaultdict(set)
    for path, node in nodes()[ast.Attribute]:
        if isinstance(node.ctx, ast.Load):
            found[node.attr].add((path, terminal(node.value)))
    return {name: frozenset(places) for name, places in found.items()}


@cache
def strings(path: str) -> frozenset[str]:
    constants = (node for node in ast.walk(trees()[ROOT / path]) if isinstance(node, ast.Constant))
    return frozenset(node.value for node in constants if isinstance(node.value, str))


def is_read(owner: type, name: str, *, except_in: tuple[str, ...] = ()) -> bool:
    """Whether some code outside the class loads ``name`` from one. ``except_in``: paths that do not count."""
    kin = {each.__name__ for each in owner.__mro__ if each.__module__.startswith("chorale.")}
    kin |= {each for each, names in declared().items() if name in names and each in protocols()}
    places = {place for each in kin for place in holders().get(each, ())}
    return any(
        (path, holder) in places or (None, holder) in places
        for path, holder in loads().get(name, ())
        if not path.relative_to(ROOT).as_posix().startswith(except_in)
    )


@cache
def protocols() -> frozenset[str]:
    classes = (node for _, node in nodes()[ast.ClassDef])
    return frozenset(n.name for n in classes if any("Protocol" in ast.dump(base) for base in n.bases))


@cache
def through_self() -> dict[str, dict[str, frozenset[str]]]:
    """Class -> method or property -> what it loads from ``self``."""
    found: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)
    for _, owner in nodes()[ast.ClassDef]:
        for part in (part for part in owner.body if isinstance(part, ast.FunctionDef)):
            used = (node for node in ast.walk(part) if isinstance(node, ast.Attribute))
            found[owner.name][part.name] = frozenset(n.attr for n in used if terminal(n.value) == "self")
    return found
