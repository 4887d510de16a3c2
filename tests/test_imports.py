"""The rooms of docs/architecture.md: the import graph is walked, and its directions asserted."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import chorale

PACKAGE = Path(chorale.__file__).parent

# room -> rooms of ours that it may import ("config" and "errors" and "version" are modules at the top)
ALLOWED: dict[str, set[str]] = {
    "harmony": {"folders", "errors"},
    "grammar": {"harmony", "errors"},
    "engine": {"errors"},
    "parallel": {"engine.types", "config", "errors", "processes"},
    "kernels": {"parallel", "errors"},
    "model": {"kernels", "parallel", "errors", "config", "demo"},
    "demo": {"folders", "model", "kernels", "harmony", "errors"},
    "runtime": {"engine.types", "grammar", "harmony", "model", "kernels", "parallel", "config", "errors"},
    "client": {"engine", "errors", "config", "processes"},
    "testing": {"client", "engine.types", "errors", "grammar"},
    "tools": {"harmony", "config", "errors", "folders", "processes", "tracing", "version"},
    "tracing": {"errors", "version"},
    "turns": {
        *("harmony", "grammar", "tools.contract", "client.base", "engine.types"),
        *("ids", "config", "errors", "tracing"),
    },
    "store": {"ids", "config", "errors"},
    "batches": {"folders", "harmony", "store", "ids", "errors", "token_usage", "tracing"},
    "api": {
        *("batches", "turns", "store", "harmony", "grammar", "tools", "client", "engine.types"),
        *("ids", "config", "errors", "processes", "tracing", "version"),
    },
    "serve": {
        "api",
        "store",
        "tools",
        "client",
        "engine",
        "runtime",
        "model",
        "parallel",
        "kernels",
        "demo",
        "grammar",
        "harmony",
        "config",
        "errors",
        "folders",
        "kv_events",
        "processes",
        "tracing",
    },
    "ray": {
        *("api", "client", "serve", "engine", "cli.options"),
        *("config", "errors", "processes"),
    },
    "selfcheck": {
        "folders",
        "kernels",
        "model",
        "runtime",
        "demo",
        "harmony",
        "config",
        "errors",
        "processes",
    },
    "bench": {"engine", "kernels", "model", "harmony", "errors", "folders", "processes"},
    "llm": {"turns", "grammar", "serve", "client", "engine", "harmony", "config", "errors", "kv_events"},
    "config": {"errors", "speculative", "kv_events"},
    "kv_events": {"errors"},
    "speculative": {"errors"},
    "errors": set(),
    "ids": set(),
    "folders": set(),
    "processes": set(),
    "version": set(),
    "sampling_fields": set(),
    "token_usage": set(),
}
for _room in ("engine", "model", "runtime", "client", "turns", "api", "llm"):
    ALLOWED[_room].add("sampling_fields")  # the table of the numbers that requests sample by
FREE = {"cli", "__init__", "__main__"}
TORCH_FREE = (
    "harmony",
    "grammar",
    "engine",
    "client",
    "testing",
    "tools",
    "turns",
    "store",
    "batches",
    "api",
    "config",
    "speculative",
    "tracing",
    "errors",
)
for _room in ("runtime", "serve", "llm"):
    ALLOWED[_room].add("speculative")
CIRCLES: set[frozenset[str]] = set()  # that are still there, by their modules


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> list[str]:
    """Every module that a file imports, wherever in the file; type-checking imports count too."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            base = node.module or ""
            found.append(base)
            if base in ("chorale", "chorale.engine"):
                found += [f"{base}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_point_one_way(path: Path) -> None:
    room = dotted(path).split(".")[0]
    if room in FREE:
        return
    allowed = ALLOWED[room]
    for name in imports(path):
        if not name.startswith("chorale."):
            continue
        target = name.removeprefix("chorale.")
        if target == "__version__" or target.split(".")[0] == room:
            continue
        ok = any(target == a or target.startswith(a + ".") for a in allowed)
        ok = ok or (target == "engine" and "engine.types" in allowed)
        assert ok, f"{dotted(path)} imports {name}: {room} may import {sorted(allowed)}"


def graph() -> dict[str, set[str]]:
    """Each module and the modules of ours that its file names; type-checking imports count too."""
    names = {dotted(path) for path in modules()}
    edges: dict[str, set[str]] = {}
    for path in modules():
        found = edges[dotted(path)] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                ours = [alias.name for alias in node.names if alias.name.startswith("chorale.")]
                targets = [name.removeprefix("chorale.") for name in ours]
            elif isinstance(node, ast.ImportFrom):
                if (node.module or "").split(".")[0] != "chorale":
                    continue  # a package elsewhere may have the name of a room: ray
                base = (node.module or "").removeprefix("chorale.")
                inside = [f"{base}.{alias.name}".removeprefix("chorale.") for alias in node.names]
                targets = [name if name in names else base for name in inside]
            else:
                continue
            found.update(target for target in targets if target in names and target != dotted(path))
    return edges


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Every group of modules that import one another, directly or through others."""

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


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"f"}}
    assert circles(edges) == {frozenset("abc"), frozenset("f")}


def test_no_modules_import_one_another() -> None:
    edges = graph()
    assert sum(map(len, edges.values())) > 1000, "the imports were not read"
    assert circles(edges) == CIRCLES


def test_the_server_starts_its_engine_by_name() -> None:
    """Neither side of ``serve`` imports the other, but for the start of a child, which both share."""
    edges = {name: found for name, found in graph().items() if name.split(".")[0] == "serve"}
    engine = {name for name in edges if f"{name}.".startswith("serve.engine.")}
    others = edges.keys() - engine
    assert len(engine) > 5
    assert {(name, found) for name in others for found in edges[name] & engine} == set()
    assert set().union(*(edges[name] & others for name in engine)) == {"serve.bootstrap", "serve.logs"}


@pytest.mark.parametrize("path", [p for p in modules() if dotted(p).split(".")[0] in TORCH_FREE], ids=dotted)
def test_torch_free_rooms_do_not_name_torch(path: Path) -> None:
    for name in imports(path):
        assert name.split(".")[0] not in ("torch", "triton"), f"{dotted(path)} imports {name}"


@pytest.mark.parametrize(
    "code",
    [
        "import chorale",
        "from chorale.cli.main import main; main(['--help'])",
        "from chorale.cli.main import main; main(['--version'])",
        "import chorale.api.app, chorale.api.http.server, chorale.client.remote, chorale.serve.supervisor",
        "import chorale.cli.commands.serve, chorale.cli.commands.doctor",
    ],
)
def test_light_processes_import_no_torch(code: str) -> None:
    check = f"{code}; import sys; assert not {{'torch', 'transformers', 'triton'}} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
