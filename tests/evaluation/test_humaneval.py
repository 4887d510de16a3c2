"""humaneval: the prompt, the code in an answer, the verdict of the sandbox, and pass@k."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from chorale.errors import ConfigError
from chorale.evaluation.task import Outcome, Reply, Sample, Scored
from chorale.evaluation.tasks.humaneval import HumanEval, humaneval, pass_at_k, solution

PROMPT = 'from math import sqrt\n\n\ndef root(x):\n    """ Return the root.\n    """\n'
BODY = "    return sqrt(x)\n"
WHOLE = f"def root(x):\n{BODY}"


def passes(text: str, prompt: str = PROMPT, name: str = "root") -> bool:
    """Whether the program in an answer computes roots. These answers are of our own making."""
    program = solution(prompt, name, text)
    if program is None:
        return False
    space: dict[str, Any] = {}
    try:
        exec(program, space)  # noqa: S102
        return bool(space[name](9) == 3)
    except Exception:
        return False


RIGHT = {
    "the function in a block": f"```python\n{WHOLE}```",
    "with words around it": f"Here it is:\n\n```python\n{WHOLE}```\n\nIt uses `sqrt`.",
    "block without a language": f"```\n{WHOLE}```",
    "block with capitals": f"```Python\n{WHOLE}```",
    "tildes": f"~~~python\n{WHOLE}~~~",
    "the prompt repeated": f"```python\n{PROMPT}{BODY}```",
    "own imports": "```python\nimport math\n\ndef root(x):\n    return math.sqrt(x)\n```",
    "a helper before it": f"```python\ndef half(x):\n    return x / 2\n\n{WHOLE}```",
    "an example of its use behind": f"```python\n{WHOLE}```\nExample:\n```python\nprint(root(4))\n```",
    "output behind": f"```python\n{WHOLE}```\n```\n2.0\n```",
    "corrected later": f"```python\ndef root(x):\n    return x\n```\nNo, so:\n```python\n{WHOLE}```",
    "only the body in a block": f"The body:\n```python\n{BODY}```",
    "the body, as the harness asks": f"{BODY}```\n\nThis returns the root.",
    "the body without a fence": BODY,
    "the body and a later block": f"{BODY}```\nUse it so:\n```python\nroot(1)\n```",
    "no fence": WHOLE,
    "an open fence": f"```python\n{WHOLE}",
    "a lambda": "```python\nroot = lambda x: sqrt(x)\n```",
    "types": "```python\ndef root(x: float) -> float:\n    return sqrt(x)\n```",
}
WRONG = {
    "nothing": "",
    "words": "Sure",
    "words with the name": "Call root(x) for it.",
    "another function": "```python\ndef sqr(x):\n    return x * x\n```",
    "a wrong function": "```python\ndef root(x):\n    return x\n```",
    "a syntax error": "```python\ndef root(x)\n    return sqrt(x)\n```",
    "the prompt only": f"```python\n{PROMPT}```",
    "a call only": "```python\nprint(root(9))\n```",
    "an early return": "```python\ndef root(x):\n    return\n    return sqrt(x)\n```",
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT.keys())
def test_right_answers_in_many_forms(text: str) -> None:
    assert passes(text)


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_wrong_answers(text: str) -> None:
    assert not passes(text)


@pytest.mark.parametrize(
    "text", [BODY, f"{BODY}```", f"{BODY}```\nmore\n```python\nx\n```", "    y = 1\n    return y\n\n\n```"]
)
def test_a_continuation_is_read_as_the_harness_does(text: str) -> None:
    """``build_predictions_instruct`` of lm_eval 0.4.13: the prompt, and the answer up to the first fence."""
    expected = text[: text.find("```")] if "```" in text else text
    assert solution(PROMPT, "root", text) == PROMPT + expected


def test_helpers_of_the_prompt_stay() -> None:
    prompt = f"def three():\n    return 3\n\n\n{PROMPT}"
    assert passes("```python\ndef root(x):\n    return three()\n```", prompt)


# ---------------------------------------------------------------------- in the sandbox


class Answers:
    def __init__(self, text: str, finish: str = "stop") -> None:
        self._reply, self.asked = Reply(text, finish_reason=finish), ""

    async def ask(self, messages: Any, **_: Any) -> Reply:
        self.asked = messages[0]["content"]
        return self._reply


def run_all(task: HumanEval, texts: list[tuple[str, str]]) -> list[Outcome]:
    samples = {sample.id: sample for sample in task.samples()}

    async def run() -> list[Outcome]:
        try:
            await task.prepare()
        except ConfigError as error:
            pytest.skip(str(error))
        asked = (task.run(samples[name], 0, Answers(text)) for name, text in texts)
        return list(await asyncio.gather(*asked))

    return asyncio.run(run())


def test_published_solutions_pass_and_others_do_not() -> None:
    task = humaneval(data=Path("sample"))
    rows = task._rows.values()
    right = [(row["task_id"], f"```python\n{row['prompt']}{row['canonical_solution']}```") for row in rows]
    wrong = [
        ("Sample/0", "```python\ndef add(a, b):\n    return a - b\n```"),
        ("Sample/2", "```python\ndef shift_back(text):\n    import os\n    os._exit(0)\n```"),
        ("Sample/3", "I cannot do that."),
    ]
    outcomes = run_all(task, right + wrong)
    assert [outcome.score for outcome in outcomes] == [1.0] * len(right) + [0.0] * 3
    assert [outcome.detail["reason"].split(":")[0] for outcome in outcomes[-3:]] == [
        *("AssertionError", "the interpreter ended", "no code"),
    ]


def test_the_prompt_is_the_harness_s() -> None:
    task, session = humaneval(data=Path("sample")), Answers("", "length")
    outcome = asyncio.run(task.run(task.samples()[0], 0, session))
    assert session.asked == (
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
        'def add(a: int, b: int) -> int:\n    """Return the sum of a and b.\n    >>> add(1, 2)\n    3\n'
        '    """\n'
        "\n```\n"
    )
    assert outcome.detail["reason"] == "the answer was cut at the token limit"


# ---------------------------------------------------------------------- pass@k


@pytest.mark.parametrize("num_right", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(num_right: int, k: int) -> None:
    answers = [place < num_right for place in range(6)]
    draws = [any(draw) for draw in itertools.combinations(answers, k)]
    assert pass_at_k(6, num_right, k) == pytest.approx(sum(draws) / len(draws))


def test_repeats_give_pass_at_k() -> None:
    samples = [Sample("a", "", ""), Sample("b", "", "")]
    right = {"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0, 0.0, 0.0, 1.0]}
    scored = [
        Scored(sample, repeat, Outcome(score, None))
        for sample in samples
        for repeat, score in enumerate(right[sample.id])
    ]
    rows = {row.name: row.score for row in humaneval(data=Path("sample")).breakdowns(scored)}
    assert rows == pytest.approx({"pass@2": (1 / 2 + 9 / 10) / 2, "pass@4": 1.0})
    assert humaneval(data=Path("sample")).breakdowns(scored[:1]) == []
