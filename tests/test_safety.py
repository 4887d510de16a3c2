"""No module of the package imports or calls anything unsafe; checked on the syntax tree."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import chorale

PACKAGE = Path(chorale.__file__).parent
FORBIDDEN_MODULES = {
    "pickle", "cloudpickle", "dill", "marshal", "shelve", "jinja2", "mako", "joblib", "telnetlib", "xmlrpc",
}  # fmt: skip
# The first use of pickle: the engine process sends tasks to its children over socket pairs that no other
# process can open and no data of clients reaches. Only Triton's types and kernels can be unpickled
# (tests/kernels/triton/precompile/test_pool.py).
ALLOWED = {
    "kernels/triton/precompile/worker_main.py": ["pickle"],
    "llm/llm.py": ["pickle"],  # writes the caller's own handles
    "runtime/transfer/base.py": [
        "pickle"
    ],  # ``read_pickle`` finds no class or function but those it is given
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"), ("torch", "save"), ("yaml", "load"), ("os", "system"), ("os", "popen"),
    ("numpy", "load"), ("np", "load"),
}  # fmt: skip
FORBIDDEN_KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}


@functools.cache
def modules() -> dict[str, str]:
    """Returns the text of each module, by its path in the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


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


def test_no_module_imports_or_calls_anything_unsafe() -> None:
    found = {name: violations(ast.parse(text)) for name, text in modules().items()}
    assert {name: each for name, each in found.items() if each} == ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from jinja2 import Template", "eval('1')", "torch.load('x')",
        "np.load(f, allow_pickle=True)", "subprocess.run('ls', shell=True)", "socket.recv_pyobj()",
    ],
)  # fmt: skip
def test_the_check_finds_unsafe_code(code: str) -> None:
    assert violations(ast.parse(code))


# Addresses that are only compared, or that the operator configures: KV events, and Ray's engines, whose
# connections are encrypted (``client/wire/curve.py``).
OTHER_MACHINES = {
    "config/options/settings.py": ('"0.0.0.0"', '"::"'),
    "config/options/flags.py": ("tcp://",),  # an example
    "api/http/request_limits.py": ('"0.0.0.0"', '"::"'),  # compared with a client's Host header
    "config/kv_events.py": ("tcp://",),
    "serve/engine/kv_events/sockets.py": ("tcp://", '"0.0.0.0"', '"::"'),
    "client/wire/curve.py": ("tcp://",),
    "serve/fleet/engine_host.py": ("tcp://",),
    "serve/fleet/holds.py": ("tcp://",),
}


def test_sockets_stay_on_this_machine() -> None:
    """Outside ``OTHER_MACHINES``, there is no wildcard address and zmq uses only unix sockets."""
    addresses = ('"0.0.0.0"', "'0.0.0.0'", '"::"', "tcp://")
    for name, text in modules().items():
        found = {each for each in addresses if each in text}
        assert found <= set(OTHER_MACHINES.get(name, ())), name
