"""``chorale eval`` calls chorale-evals, or says how to install it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import chorale
from chorale.cli.main import main
from chorale.errors import evals_hint

PACKAGE = Path(chorale.__file__).parent


def test_without_the_package_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without = [path for path in sys.path if not Path(path, "chorale_evals").exists()]
    monkeypatch.setattr(sys, "path", without)
    for name in [name for name in sys.modules if name.partition(".")[0] == "chorale_evals"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["eval", "--help"]) == 2
    assert evals_hint() in capsys.readouterr().err


def test_arguments_and_exit_code_are_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("chorale_evals")
    assert main(["eval", "report", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_no_other_module_imports_the_package() -> None:
    found = [
        path.relative_to(PACKAGE)
        for path in PACKAGE.rglob("*.py")
        if "chorale_evals" in (text := path.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("chorale_evals"))
        or (isinstance(node, ast.Import) and any(one.name.startswith("chorale_evals") for one in node.names))
        or (isinstance(node, ast.Constant) and node.value == "chorale_evals")
    ]
    assert found == [Path("cli/commands/measure/eval.py")]
