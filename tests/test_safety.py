"""Safe by construction: what no module of the package may import or call, checked on the syntax tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import chorale

PACKAGE = Path(chorale.__file__).parent
FORBIDDEN_MODULES = {
    "pickle", "cloudpickle", "dill", "marshal", "shelve", "jinja2", "mako", "joblib", "telnetlib", "xmlrpc",
}  # fmt: skip
# The one exception to the rule that nothing is unpickled: tasks of the engine process for its own children,
# over socket pairs that only these two hold. No other process, and nothing that a client sends, reaches them.
# Only Triton's types and kernels are found by name (tests/kernels/triton/precompile/test_pool.py).
ALLOWED = {"kernels/triton/precompile/worker_main.py": ["pickle"]}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"), ("torch", "save"), ("yaml", "load"), ("os", "system"), ("os", "popen"),
    ("numpy", "load"), ("np", "load"),
}  # fmt: skip
FORBIDDEN_KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def violations(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
                found.append(node.module or "")
        elif isinstance(node, ast.Call):
            found += _call_violations(node)
    return found


def _call_violations(node: ast.Call) -> list[str]:
    found = [
        f"{k.arg}=" for k in node.keywords
        if k.arg in FORBIDDEN_KEYWORDS and not (isinstance(k.value, ast.Constant) and k.value.value is False)
    ]  # fmt: skip
    if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
        found.append(node.func.id)
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        pair = (node.func.value.id, node.func.attr)
        if pair in FORBIDDEN_ATTRIBUTES or pair[1] in ("recv_pyobj", "send_pyobj"):
            found.append(".".join(pair))
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_dangerous(path: Path) -> None:
    allowed = ALLOWED.get(path.relative_to(PACKAGE).as_posix(), [])
    assert violations(ast.parse(path.read_text("utf-8"))) == allowed


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from jinja2 import Template", "eval('1')", "torch.load('x')",
        "np.load(f, allow_pickle=True)", "subprocess.run('ls', shell=True)", "socket.recv_pyobj()",
    ],
)  # fmt: skip
def test_the_check_itself_finds(code: str) -> None:
    assert violations(ast.parse(code))


# What the operator asks for: addresses to compare with, KV events, and Ray's engines, whose connections are
# encrypted (``client/wire/curve.py``).
OTHER_MACHINES = {
    "config/options/settings.py": ('"0.0.0.0"', '"::"'),
    "config/options/flags.py": ("tcp://",),  # an example
    "api/http/request_limits.py": ('"0.0.0.0"', '"::"'),  # names in a client's Host header
    "config/kv_events.py": ("tcp://",),
    "serve/engine/kv_events/sockets.py": ("tcp://", '"0.0.0.0"', '"::"'),
    "client/wire/curve.py": ("tcp://",),
    "serve/fleet/engine_host.py": ("tcp://",),
    "serve/fleet/holds.py": ("tcp://",),
}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sockets_stay_on_this_machine(path: Path) -> None:
    """No wildcard address is written anywhere; zmq endpoints are unix sockets."""
    text = path.read_text("utf-8")
    allowed = OTHER_MACHINES.get(path.relative_to(PACKAGE).as_posix(), ())
    found = [each for each in ('"0.0.0.0"', "'0.0.0.0'", '"::"', "tcp://") if each in text]
    assert set(found) <= set(allowed)
