"""One usage object for several choices, and for several prompts."""

from __future__ import annotations

from chorale.api.usage import of_choices, of_prompts
from chorale.turns.events import Usage


def choice(cached: int, *later: tuple[int, int]) -> Usage:
    """A choice of a prompt of 40 tokens. ``later``: (prompt tokens, of them cached) of its later rounds."""
    size, repeated = (sum(each[place] for each in later) for place in (0, 1))
    return Usage(
        input_tokens=40 + size,
        cached_tokens=cached + repeated,
        output_tokens=10,
        reasoning_tokens=3,
        later_input_tokens=size,
        later_cached_tokens=repeated,
    )


def test_the_prompt_of_all_choices_counts_once_and_as_cached_only_where_it_was_for_the_first() -> None:
    found = of_choices([choice(0), choice(16), choice(32)])
    assert (found.input_tokens, found.cached_tokens) == (40, 0)
    assert (found.output_tokens, found.reasoning_tokens) == (30, 9)


def test_later_rounds_are_each_choices_own() -> None:
    found = of_choices([choice(16, (60, 50)), choice(32, (70, 50), (90, 80))])
    assert found.input_tokens == 40 + 60 + 70 + 90
    assert found.cached_tokens == 16 + 50 + 50 + 80


def test_several_prompts_are_summed() -> None:
    found = of_prompts([choice(16), choice(32, (70, 50))])
    assert (found.input_tokens, found.cached_tokens, found.output_tokens) == (150, 98, 20)
