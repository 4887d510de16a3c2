"""``py.typed``: a user's type checker sees the types of the public names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import chorale

GOOD = """
from chorale import LLM, EngineConfig, SamplingParams, __version__
from chorale import ChoraleError, CompletionOutput, RequestOutput, StructuredOutputsParams

failure: type[Exception] = ChoraleError
choices: list[CompletionOutput] = RequestOutput("0", None, [], []).outputs
params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))

def answer(question: str) -> str:
    with LLM("demo", max_model_len=EngineConfig(max_model_len=512).max_model_len) as llm:
        params = SamplingParams(temperature=0.5, max_tokens=20)
        outputs = llm.chat([{"role": "user", "content": question}], params)
        reveal_type(outputs)
        return outputs[0].outputs[0].text

version: str = __version__
"""
BAD = """
from chorale import LLM, SamplingParams

SamplingParams.from_defaults("hot")
llm = LLM("demo")
number: int = llm.generate("a")[0].outputs[0].text
"""


def check(folder: Path, source: str) -> str:
    """Returns mypy --strict's output for ``source``, outside the repository and its configuration."""
    (folder / "user.py").write_text(source)
    command = [
        sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", "user.py",
    ]  # fmt: skip
    environment = {"MYPYPATH": "", "PATH": "", "HOME": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    return done.stdout + done.stderr


def test_each_public_name_is_there() -> None:
    for name in chorale.__all__:
        assert getattr(chorale, name) is not None
    assert chorale.RequestOutput is chorale.llm.RequestOutput
    with pytest.raises(AttributeError, match="Llm"):
        chorale.__getattr__("Llm")


def test_the_public_names_are_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert (Path(chorale.__file__).parent / "py.typed").exists()
    said = check(tmp_path, GOOD)
    assert "Revealed type is" in said
    assert "RequestOutput" in said
    assert "error:" not in said, said
    said = check(tmp_path, BAD)
    assert 'user.py:4: error: Argument 1 to "from_defaults" of "SamplingParams" has incompatible type' in said
    assert "user.py:6: error: Incompatible types in assignment" in said
