"""``unit_test``: the answer's program passes tests, in the python tool's sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from chorale_evals.graders.sandbox import Ran, run_program
from chorale_evals.graders.text import fences
from chorale_evals.graders.verdict import Verdict

_PYTHON = ("python", "py", "python3", "")


def program(text: str) -> str:
    """Returns the Python blocks of an answer joined, or the whole text if it has no fenced block.

    Blocks that are marked as another language (a shell session, output) are left out.
    """
    blocks = fences(text)
    python = [code for language, code in blocks if language in _PYTHON]
    named = [code for language, code in blocks if language in _PYTHON[:3]]
    return "\n".join(named or python) if blocks else text


async def grade(
    text: str,
    target: str,
    *,
    seconds: float = 10.0,
    run: Callable[[str, float], Awaitable[Ran]] = run_program,
) -> Verdict:
    """Runs the program, then ``target`` in the same interpreter: it passes if no statement raises."""
    code = program(text)
    if not code.strip():
        return Verdict(False, None, "no program")
    ran = await run(f"{code}\n\n{target}\n", seconds)
    return Verdict(ran.passed, code[:4000], ran.reason, {"output": ran.output[-2000:]} if ran.output else {})
