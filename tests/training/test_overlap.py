"""Training does not say what the requests written by hand ask, but for what has few ways of being said."""

from __future__ import annotations

from training.handwritten import load
from training.overlap import overlap, plain

# "Wer bist du?" and "lol" are asked like that by everybody; "7 / 2" by chance. ``python -m training.overlap``
# draws more conversations and prints each.
MAY_BE_SAID = ("languages", "stops", "division")


def test_signs_and_case_are_ignored() -> None:
    assert plain(' Who  ARE you?!" ') == plain("who are you")


def test_requests_that_occur_in_training_are_found() -> None:
    found = overlap(["who ARE you", "this sentence is in no family at all"], 200)
    assert list(found) == ["who are you"]
    assert "talk.chat" in found["who are you"]


def test_other_requests_do_not_occur_in_training() -> None:
    requests = load(("unseen", "fresh"))
    found = overlap((one["ask"] for asked in requests.values() for one in asked), 300)
    equal = {
        kind: [one["ask"] for one in asked if plain(one["ask"]) in found]
        for kind, asked in requests.items()
        if not kind.endswith(MAY_BE_SAID)
    }
    assert {kind: texts for kind, texts in equal.items() if texts} == {}
