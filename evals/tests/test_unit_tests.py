"""The grader ``unit_test``: which code of an answer runs, and the verdict of the sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from chorale_evals.graders.sandbox import Ran, open_sandbox
from chorale_evals.graders.unit_test import grade, program

from chorale.cli.main import main
from chorale.errors import ConfigError
from chorale.tools.python.sandbox import SandboxMissing

PROGRAMS = [
    ("def f(): return 1", "def f(): return 1"),
    ("Here:\n```python\ndef f(): return 1\n```\nDone.", "def f(): return 1"),
    ("```py\na = 1\n```\ntext\n```python\nb = 2\n```", "a = 1\nb = 2"),
    ("```\na = 1\n```", "a = 1"),
    ("```python\na = 1\n```\n```\n1\n```", "a = 1"),  # the second block is output
    ("```bash\nls\n```\n```python\na = 1\n```", "a = 1"),
    ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
    ("~~~python\na = 1\n~~~", "a = 1"),
    ("```bash\nls\n```", ""),
    ("```python\na = 1", "```python\na = 1"),  # cut: not closed
]


@pytest.mark.parametrize(("text", "code"), PROGRAMS)
def test_the_python_blocks_of_an_answer_run(text: str, code: str) -> None:
    assert program(text) == code


def test_the_sandbox_decides() -> None:
    ran: list[tuple[str, float]] = []

    async def run(code: str, seconds: float) -> Ran:
        ran.append((code, seconds))
        return Ran("raised", "Traceback\nAssertionError: no")

    verdict = asyncio.run(grade("```python\nx = 1\n```", "assert x == 2", seconds=3, run=run))
    assert (verdict.score, verdict.detail["reason"]) == (0.0, "AssertionError: no")
    assert ran == [("x = 1\n\nassert x == 2\n", 3)]
    assert not asyncio.run(grade("", "assert True", run=run)).score
    assert len(ran) == 1


def test_right_and_wrong_programs() -> None:
    async def both() -> list[bool]:
        try:
            runner = await open_sandbox()
        except ConfigError as error:
            pytest.skip(str(error))
        tests = "assert f(10) == 55\nassert f(0) == 0"
        right = (
            "```python\ndef f(n):\n    a, b = 0, 1\n    for _ in range(n): a, b = b, a + b\n    return a\n```"
        )
        texts = (right, right.replace("return a", "return b"))
        graded = [await grade(text, tests, run=runner.run) for text in texts]
        return [verdict.score == 1.0 for verdict in graded]

    assert asyncio.run(both()) == [True, False]


def test_without_a_sandbox_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fake_server import FakeServer, chat

    async def missing(*_: object) -> None:
        raise SandboxMissing("not installed (apt install it)")

    monkeypatch.setattr("chorale.tools.options.check_program", missing)
    line = {"prompt": "x", "answer": "assert True", "grader": "unit_test"}
    (tmp_path / "code.jsonl").write_text(json.dumps(line))
    with FakeServer(lambda *_: chat("x")).running() as fake:
        arguments = (
            "eval",
            f"file:{tmp_path}/code.jsonl",
            "--base-url",
            fake.url,
            "--out",
            str(tmp_path / "out"),
        )
        assert main(arguments) == 2
    assert fake.bodies == []
    assert "in a sandbox only: no sandbox works here" in capsys.readouterr().err
