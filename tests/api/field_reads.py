"""Finds where the fields of a class are read, from all attribute reads in ``chorale``.

A field counts as read if code outside its class reads it from a variable, parameter, attribute or field that
is annotated with the class, or with a class or protocol that also declares the field.
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
    """Returns all nodes by type. Cached, because one walk takes seconds."""
    found: dict[type[ast.AST], list[tuple[Path, Any]]] = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            found[type(node)].append((path, node))
    return found


def names_in(annotation: ast.AST | None) -> Iterator[str]:
    """Yields the identifiers of an annotation, including quoted ones."""
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


@cache
def holders() -> dict[str, frozenset[tuple[Path | None, str]]]:
    """Returns class -> names annotated with it: (file, name) of a variable, (None, name) of a field."""
    found: dict[str, set[tuple[Path | None, str]]] = defaultdict(set)
    returning: dict[str, set[str]] = defaultdict(set)  # function -> classes in its return type
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
    fields: dict[str, set[str]] = defaultdict(set)  # field -> classes in its annotation
    for name, sources in found.items():
        for path, holder in sources:
            if path is None:
                fields[holder].add(name)
    for path, node in nodes()[ast.Assign]:
        if isinstance(node.targets[0], ast.Name | ast.Attribute):
            for term in set(map(terminal, ast.walk(node.value))):
                for name in {term, *returning.get(term, ()), *fields.get(term, ())}:
                    found[name].add((path, terminal(node.targets[0])))
    return {name: frozenset(sources) for name, sources in found.items()}


def terminal(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return terminal(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def declared() -> dict[str, frozenset[str]]:
    """Returns class -> names that its body declares. Classes are identified by bare names."""
    found: dict[str, set[str]] = defaultdict(set)
    for _, node in nodes()[ast.ClassDef]:
        for member in node.body:
            if isinstance(member, ast.AnnAssign):
                found[node.name].add(terminal(member.target))
            elif isinstance(member, ast.FunctionDef):
                found[node.name].add(member.name)
    return {name: frozenset(fields) for name, fields in found.items()}


@cache
def loads() -> dict[str, frozenset[tuple[Path, str]]]:
    """Returns attribute -> (file, name of the variable or attribute that it is read from)."""
    found: dict[str, set[tuple[Path, str]]] = defaultdict(set)
    for path, node in nodes()[ast.Attribute]:
        if isinstance(node.ctx, ast.Load):
            found[node.attr].add((path, terminal(node.value)))
    return {name: frozenset(sources) for name, sources in found.items()}


@cache
def strings(path: str) -> frozenset[str]:
    constants = (node for node in ast.walk(trees()[ROOT / path]) if isinstance(node, ast.Constant))
    return frozenset(node.value for node in constants if isinstance(node.value, str))


def is_read(owner: type, name: str, *, except_in: tuple[str, ...] = ()) -> bool:
    """Returns whether code outside the class reads field ``name``. ``except_in``: path prefixes to ignore."""
    kin = {each.__name__ for each in owner.__mro__ if each.__module__.startswith("chorale.")}
    kin |= {each for each, names in declared().items() if name in names and each in protocols()}
    sources = {source for each in kin for source in holders().get(each, ())}
    return any(
        (path, holder) in sources or (None, holder) in sources
        for path, holder in loads().get(name, ())
        if not path.relative_to(ROOT).as_posix().startswith(except_in)
    )


@cache
def protocols() -> frozenset[str]:
    classes = (node for _, node in nodes()[ast.ClassDef])
    return frozenset(n.name for n in classes if any("Protocol" in ast.dump(base) for base in n.bases))


@cache
def through_self() -> dict[str, dict[str, frozenset[str]]]:
    """Returns class -> method or property -> attributes that it reads from ``self``."""
    found: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)
    for _, owner in nodes()[ast.ClassDef]:
        for member in (member for member in owner.body if isinstance(member, ast.FunctionDef)):
            used = (node for node in ast.walk(member) if isinstance(node, ast.Attribute))
            found[owner.name][member.name] = frozenset(n.attr for n in used if terminal(n.value) == "self")
    return found
