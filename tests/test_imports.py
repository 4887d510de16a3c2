"""Imports between packages follow the directions of docs/explanation/architecture.md and have no cycles."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import chorale

PACKAGE = Path(chorale.__file__).parent

# package: the packages or modules that it may import
DIRECTIONS = """
errors:
ids:
_version:
version: _version
config: errors
machine: config errors version
harmony: errors machine
tracing: errors version
engine: config errors
grammar: errors harmony
store: config errors ids
tools: config errors harmony machine tracing version
client: config engine errors machine
parallel: config engine errors machine
kernels: engine.types errors machine parallel
turns: client.base config engine.types errors grammar harmony ids tools.contract tracing
requests: config errors grammar harmony tools tracing turns
model: config errors harmony kernels machine parallel
runtime: config engine errors grammar harmony kernels machine model parallel
jobs: client config engine.types errors harmony ids machine requests store tracing
api: client config engine errors grammar harmony ids jobs machine requests store tools tracing turns version
serve: api client config engine errors grammar harmony jobs kernels machine model parallel runtime store tools
serve: requests tracing
measure: config engine errors harmony kernels machine model requests runtime serve
llm: api.telemetry client config engine errors grammar harmony machine requests serve tools.contract turns
"""
ALLOWED: dict[str, set[str]] = {}
for _line in DIRECTIONS.strip().splitlines():
    ALLOWED.setdefault(_line.partition(":")[0], set()).update(_line.partition(":")[2].split())
FREE = {"cli", "__init__", "__main__"}
TORCH_FREE = ALLOWED.keys() - {
    "kernels", "llm", "measure", "model", "parallel", "runtime", "serve",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@functools.cache
def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Returns the imports anywhere in a file, for type checking too."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def foreign_imports(path: Path) -> set[str]:
    """Returns the top-level packages that a file imports."""
    nodes = imports(path)
    assert all(node.level == 0 for node in nodes if isinstance(node, ast.ImportFrom)), (
        f"{path}: relative import"
    )
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_imports_point_one_way() -> None:
    faults = []
    for name, found in graph().items():
        package = name.split(".")[0]
        for target in found if package not in FREE else ():
            allowed = {package} | ALLOWED[package]
            if not any(f"{target}.".startswith(f"{each}.") for each in allowed):
                faults.append(f"{name} imports {target}")
    assert not faults


def graph() -> dict[str, set[str]]:
    """Returns, for each module, the modules of Chorale that it imports."""
    names = {dotted(path) for path in modules()}
    edges: dict[str, set[str]] = {}
    for path in modules():
        found = edges[dotted(path)] = set()
        for node in imports(path):
            if isinstance(node, ast.Import):
                ours = [alias.name for alias in node.names if alias.name.startswith("chorale.")]
                targets = [name.removeprefix("chorale.") for name in ours]
            else:
                if (node.module or "").split(".")[0] != "chorale":
                    continue  # another package, even if it has the name of one of Chorale's
                base = (node.module or "").removeprefix("chorale.")
                inside = [f"{base}.{alias.name}".removeprefix("chorale.") for alias in node.names]
                targets = [name if name in names else base for name in inside]
            found.update(target for target in targets if target in names and target != dotted(path))
    return edges


def cycles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Returns every group of modules that import one another, directly or through others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            fresh = edges[waiting.pop()] - seen
            seen |= fresh
            waiting += fresh
        return seen

    from_each = {name: reached(name) for name in edges}
    found = {name: {other for other in seen if name in from_each[other]} for name, seen in from_each.items()}
    return {frozenset(group) for group in found.values() if group}


def test_import_cycles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"f"}}
    assert cycles(edges) == {frozenset("abc"), frozenset("f")}


def test_there_are_no_import_cycles() -> None:
    edges = graph()
    assert sum(map(len, edges.values())) > 1000, "the imports were not read"
    assert cycles(edges) == set()


def test_no_chain_of_imports_is_longer_than_22_modules() -> None:
    edges, levels = graph(), dict[str, int]()

    def level(name: str) -> int:
        if name not in levels:
            levels[name] = 1 + max(map(level, edges[name]), default=0)
        return levels[name]

    assert max(map(level, edges)) <= 22


@pytest.mark.parametrize("root", ["chorale", "tests"])
def test_no_folder_has_more_than_16_python_files(root: str) -> None:
    folders = {path.parent for path in (PACKAGE.parent / root).rglob("*.py")}
    assert {
        str(each): len(list(each.glob("*.py"))) for each in folders if len(list(each.glob("*.py"))) > 16
    } == {}


def test_the_children_of_a_folder_do_not_import_one_another() -> None:
    edges = graph()
    parents = {name.rpartition(".")[0] for name in edges}
    folders = {
        ".".join(parts[:i]) for parts in (name.split(".") for name in parents) for i in range(len(parts) + 1)
    }
    found = set()
    for folder in folders:
        start = f"{folder}." if folder else ""
        children: dict[str, set[str]] = {}
        for name, targets in edges.items():
            if name.startswith(start):
                child = name.removeprefix(start).split(".")[0]
                inside = {t.removeprefix(start).split(".")[0] for t in targets if t.startswith(start)}
                children.setdefault(child, set()).update(inside - {child})
        children = {child: targets & children.keys() for child, targets in children.items()}
        if cycles(children):
            found.add(folder)
    assert not found


def test_the_server_starts_its_engine_by_name() -> None:
    """The engine's part of ``serve`` and the rest share only ``bootstrap`` and ``logs``."""
    edges = {name: found for name, found in graph().items() if name.split(".")[0] == "serve"}
    engine = {name for name in edges if f"{name}.".startswith("serve.engine.")}
    others = edges.keys() - engine
    assert len(engine) > 5
    assert {(name, found) for name in others for found in edges[name] & engine} == set()
    assert set().union(*(edges[name] & others for name in engine)) == {"serve.bootstrap", "serve.logs"}


def test_torch_free_packages_do_not_name_torch() -> None:
    found = {dotted(path): foreign_imports(path) for path in modules()}
    names = {name for name in found if name.split(".")[0] in TORCH_FREE}
    assert len(names) > 300
    assert {name for name in names if found[name] & {"torch", "triton"}} == set()


@pytest.mark.parametrize(
    "code",
    [
        "import chorale",
        "from chorale.cli.main import main; main(['--help'])",
        "from chorale.cli.main import main; main(['--version'])",
        "import chorale.api.app, chorale.serve.http.server, chorale.client.remote, chorale.serve.supervisor",
        "import chorale.cli.commands.serve.serve, chorale.cli.commands.machine.doctor",
        "import chorale.kernels.ops, chorale.model.config, chorale.model.hub, chorale.model.demo",
    ],
)
def test_light_processes_import_no_torch(code: str) -> None:
    heavy = {"torch", "transformers", "triton", "safetensors", "openai", "fastapi"}
    check = f"{code}; import sys; assert not {heavy} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
