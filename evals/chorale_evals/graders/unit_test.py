"""``unit_test``: the answer's program passes tests, in the python tool's sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from chorale_evals.graders import verdict
from chorale_evals.graders.sandbox import Ran, run_program
from chorale_evals.graders.text import fences
from chorale_evals.task import Outcome

_PYTHON = ("python", "py", "python3")


def program(text: str) -> str:
    """Returns the Python blocks of an answer joined, or the whole text if it has no fenced block.

    Blocks that are marked as another language (a shell session, output) are left out.
    """
    blocks = fences(text)
    named = [code for language, code in blocks if language in _PYTHON]
    unnamed = [code for language, code in blocks if not language]
    return "\n".join(named or unnamed) if blocks else text


async def grade(
    text: str, target: str, *, seconds: float = 10.0,
    run: Callable[[str, float], Awaitable[Ran]] = run_program,
) -> Outcome:  # fmt: skip
    """Runs the program, then ``target`` in the same interpreter: it passes if no statement raises."""
    code = program(text)
    if not code.strip():
        return verdict(False, None, "no program")
    ran = await run(f"{code}\n\n{target}\n", seconds)
    outcome = verdict(ran.passed, code[:4000], ran.reason)
    if ran.output:
        outcome.detail["output"] = ran.output[-2000:]
    return outcome
