"""The verdict over recordings whose differences are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from chorale_evals.parity.differences import compare
from chorale_evals.parity.recording import Recording
from chorale_evals.parity.result import table, to_json
from chorale_evals.parity.verdict import BOUNDS, Judgement, judge
from readings import LENGTH, noise_like, parted, recording

from chorale.errors import ConfigError

FLOAT32, BFLOAT16 = 3e-6, 2e-2


def verdict(a: Recording, b: Recording, formats: str | None = None) -> Judgement:
    return judge(compare(a, b), formats)


@pytest.mark.parametrize("noise", [0.0, FLOAT32, BFLOAT16])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.1])
def test_different_rounding_is_judged_equal(noise: float, share: float) -> None:
    """This holds also if a crowd changes the rounding of few of A's tokens, and B's differs everywhere."""
    found = verdict(recording("a", 1, noise, share=share), recording("b", 2, noise, share=share))
    assert (found.verdict, found.meets("equal")) == ("equal", True), found.reasons


# (A's noise, B's noise, what B's readings differ by in addition, formats) -> (verdict, expectations it meets)
PRECISIONS = {
    "coarser rounding": ((FLOAT32, BFLOAT16, 0.0, None), ("precision", ["bf16", "fp8-kv"])),
    "above the bound of bf16": ((1e-3, 1e-3, 0.15, None), ("precision", ["fp8-kv"])),
    "equal formats": ((FLOAT32, BFLOAT16, 0.0, "bfloat16"), ("different", [])),
    "equal formats and noise": ((FLOAT32, FLOAT32, 0.0, "bfloat16"), ("equal", ["equal", "bf16", "fp8-kv"])),
    "B as exact as A": ((FLOAT32, FLOAT32, 0.01, None), ("different", [])),
    "no noise, which says nothing of formats": ((0.0, 0.0, 0.01, None), ("precision", ["bf16", "fp8-kv"])),
    "another model": ((FLOAT32, FLOAT32, 2.0, None), ("different", [])),
}


@pytest.mark.parametrize("case", PRECISIONS)
def test_a_precision_explains_a_difference_within_its_bound_and_bs_noise(case: str) -> None:
    (noise_a, noise_b, off, formats), expected = PRECISIONS[case]
    b = recording("b", 2, noise_b, lambda exact, rng: noise_like(off, len(exact), rng))
    found = verdict(recording("a", 1, noise_a), b, formats)
    met = [name for name in ("equal", "bf16", "fp8-kv") if found.meets(name)]
    assert (found.verdict, met) == expected, found.reasons
    if found.verdict == "precision":
        assert found.precision == met[0]


def test_the_reason_names_bs_own_noise() -> None:
    found = verdict(recording("a", 1, FLOAT32), recording("b", 2, BFLOAT16))
    assert "as large as B's own noise" in found.reasons[-1]


@pytest.mark.parametrize(
    ("every", "nats", "expected"),
    [(0, 0.0, "precision"), (1000, 25.0, "different"), (40, 6.0, "different")],
    ids=["none", "seven gross", "a fortieth large"],
)
def test_a_gross_fault_in_few_positions_is_not_a_different_precision(
    every: int, nats: float, expected: str
) -> None:
    """The mean is within the bound of fp8-kv."""

    def fault(exact: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        off = noise_like(0.1, len(exact), rng)
        if every:
            off[rng.random(len(exact)) < 1 / every] += nats * rng.choice((-1.0, 1.0))
        return off

    found = verdict(recording("a", 1, 1e-3), recording("b", 2, 1e-3, fault))
    assert found.size.high < BOUNDS["fp8-kv"]
    assert (found.verdict, found.meets("fp8-kv")) == (expected, expected == "precision"), found.reasons


@pytest.mark.parametrize(("margin", "expected"), [(1.0, "precision"), (3.0, "different")])
def test_continuations_part_by_no_more_than_a_precision_explains(margin: float, expected: str) -> None:
    coarse = recording("b", 2, 1e-3, lambda exact, rng: noise_like(0.1, len(exact), rng))
    found = verdict(recording("a", 1, 1e-3), parted(coarse, 5, margin))
    assert (found.verdict, found.meets("fp8-kv")) == (expected, expected == "precision"), found.reasons


@pytest.mark.parametrize(("noise", "factor"), [(FLOAT32, 5.0), (BFLOAT16, 3.0)])
def test_a_difference_that_begins_at_a_position_is_a_fault_of_any_size(noise: float, factor: float) -> None:
    def window(exact: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        far = np.arange(len(exact)) >= 128
        return far * noise_like(factor * noise, len(exact), rng)

    found = verdict(recording("a", 1, noise), recording("b", 2, noise, window))
    assert found.verdict == "different", found.reasons
    assert any("begin or grow at position 128" in reason for reason in found.reasons)
    assert [step.position for step in found.steps if step.is_sign] == [128]


def test_a_difference_in_one_direction_is_a_fault_of_any_size() -> None:
    a = recording("a", 1, BFLOAT16)
    found = verdict(a, recording("b", 2, BFLOAT16, lambda exact, rng: np.full(len(exact), -0.03)))
    assert found.verdict == "different"
    assert any("one direction" in reason for reason in found.reasons)


def test_one_different_text_is_not_lost_among_the_others() -> None:
    """One text in ten differs, from its middle on."""
    a = recording("a", 1, FLOAT32)
    b = recording("b", 2, FLOAT32)
    last = b.readings[-1]
    token = last.alone.token.copy()
    token[LENGTH // 2 :] += noise_like(1e-3, LENGTH // 2, np.random.default_rng(5)).astype(np.float32)
    changed = replace(last, alone=replace(last.alone, token=token))
    found = verdict(a, replace(b, readings=(*b.readings[:-1], changed)))
    assert not found.meets("equal"), found.reasons
    assert found.groups[-1].name == "text-9"
    assert "text-9" in found.reasons[0]


@pytest.mark.parametrize(("margin", "expected"), [(1e-6, "equal"), (0.2, "different"), (3.0, "different")])
def test_a_continuation_that_parts_at_a_tie_is_rounding(margin: float, expected: str) -> None:
    a, b = recording("a", 1, FLOAT32), recording("b", 2, FLOAT32)
    top = a.readings[0].greedy_scores.top.copy()
    top[5] = a.readings[0].greedy_scores.token[5] + np.array((0.0, -1e-6, -20.0), np.float32)
    ids = a.readings[0].greedy_scores.top_ids.copy()
    ids[5] = (5, 1, 2)
    first = replace(a.readings[0], greedy_scores=replace(a.readings[0].greedy_scores, top=top, top_ids=ids))
    found = verdict(replace(a, readings=(first, *a.readings[1:])), parted(b, 5, margin))
    assert found.verdict == expected, found.reasons
    ((name, where),) = found.divergences
    assert (name, where.place, where.token_a, where.token_b) == ("text-0", 5, 5, 1)
    assert where.margin_b == pytest.approx(margin, abs=2e-6)


def test_a_crowd_that_disturbs_b_is_found() -> None:
    """B equals A when it is alone, but not together with other requests."""
    a, b = recording("a", 1, FLOAT32), recording("b", 2, FLOAT32)
    rng = np.random.default_rng(3)

    def disturbed(one: Recording) -> Recording:
        readings = []
        for each in one.readings:
            token = each.again.token + noise_like(1.0, len(each.again.token), rng).astype(np.float32)
            readings.append(replace(each, again=replace(each.again, token=token)))
        return replace(one, readings=tuple(readings))

    found = verdict(a, disturbed(b))
    assert found.verdict == "different"
    assert "B in a crowd" in found.reasons[0]


def test_a_difference_near_the_bound_is_inconclusive() -> None:
    def some(exact: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return noise_like(1.15e-5, len(exact), rng)

    found = verdict(recording("a", 1, FLOAT32), recording("b", 7, FLOAT32, some))
    assert found.verdict == "inconclusive", found.reasons
    assert not found.meets("fp8-kv")
    group = max(found.groups, key=lambda one: one.ratio.value)
    assert group.ratio.low <= 4 < group.ratio.value


def test_recordings_of_other_texts_are_refused() -> None:
    a, b = recording("a", 1, 0.0), recording("b", 1, 0.0)
    with pytest.raises(ConfigError, match="hold different texts"):
        compare(a, replace(b, readings=b.readings[1:]))


def test_the_table_and_the_json_agree() -> None:
    a, b = recording("a", 1, FLOAT32), recording("b", 2, BFLOAT16)
    pairs = compare(a, b)
    found = judge(pairs)
    result, lines = to_json(a, b, pairs, found, "bf16"), list(table(a, b, pairs, found, "bf16"))
    assert (result["verdict"], result["as_expected"]) == ("precision", True)
    assert "Verdict: different precision (as expected)" in lines
    assert [group["name"] for group in result["groups"]][:4] == ["all", "1..63", "64..127", "128..255"]
    assert result["groups"][0]["tokens"] == 10 * (LENGTH - 1)  # the first token of a text has no score
    assert result["texts"][0]["worst"] <= result["groups"][0]["worst"]
    assert not any("not trained" in line for line in lines)


def test_the_table_says_that_weights_are_not_trained() -> None:
    untrained = recording("a", 1, FLOAT32, lambda exact, rng: np.full_like(exact, -10.0))
    pairs = compare(untrained, untrained)
    lines = list(table(untrained, untrained, pairs, judge(pairs), "equal"))
    assert "A's weights are not trained: the texts have -13.0 nats a token, a guess -12.2." in lines
