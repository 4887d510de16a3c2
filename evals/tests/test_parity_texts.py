"""Texts have an exact length, are the same on every machine and repeat at the distance of the window."""

from __future__ import annotations

import hashlib

from chorale_evals.parity.texts import KINDS, make_texts

from chorale.harmony.vocab import load_vocabulary


def test_texts_are_the_same_everywhere() -> None:
    texts = make_texts([64, 300], 6)
    assert [(text.length, len(text.token_ids)) for text in texts] == [(64, 64)] * 6 + [(300, 300)] * 6
    assert {text.kind for text in texts} == set(KINDS)
    assert len({text.name for text in texts}) == len(texts)
    assert len({text.token_ids for text in texts}) == len(texts)  # the sixth is a second prose text
    together = ",".join(str(token) for text in texts for token in text.token_ids)
    assert hashlib.sha256(together.encode()).hexdigest()[:16] == "0c273949fd83480e"


def test_texts_of_each_kind_are_readable() -> None:
    vocab = load_vocabulary()
    by_kind = {text.kind: vocab.decode(text.token_ids) for text in make_texts([200], 5)}
    assert by_kind["conversation"].startswith("<|start|>system<|message|>You are ChatGPT")
    assert "def " in by_kind["code"]
    assert "station,low,high" in by_kind["numbers"]


def test_echoes_repeat_one_token_short_of_the_window() -> None:
    (text,) = (text for text in make_texts([700], 5) if text.kind == "echoes")
    ids = text.token_ids
    assert all(ids[place] == ids[place - 127] for place in range(127, 5 * 127))
