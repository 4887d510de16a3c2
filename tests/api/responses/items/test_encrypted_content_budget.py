"""The sealed texts of a request share a budget, beyond which nothing is unpacked."""

from __future__ import annotations

import base64
import tracemalloc
import zlib

import pytest

from chorale.api.responses.items import encrypted_content
from chorale.api.responses.items.encrypted_content import MAX_BYTES, Budget, seal, unseal
from chorale.api.responses.items.input import parse_items
from chorale.errors import RequestError

BOMB = "chorale1." + base64.b64encode(zlib.compress(b"a" * (MAX_BYTES - 1), 9)).decode()


def test_at_most_the_budget_is_unpacked() -> None:
    """Neither a further item nor the rest of a longer text."""
    bomb = "chorale1." + base64.b64encode(zlib.compress(bytes(20 * MAX_BYTES), 1)).decode()
    items = [{"type": "compaction", "encrypted_content": text} for text in (BOMB, bomb, *[BOMB] * 99)]
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as caught:
            parse_items(items)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.param == "input[1].encrypted_content"
    assert caught.value.code == "string_above_max_length"
    assert peak < 10 * MAX_BYTES


def test_the_budget_is_exact() -> None:
    budget = Budget(10)
    assert unseal(seal("a" * 7), "x", budget) == "a" * 7
    assert unseal(seal("é"), "x", budget) == "é"
    assert budget.left == 1
    assert unseal(seal("b"), "x", budget) == "b"
    with pytest.raises(RequestError) as caught:
        unseal(seal("c"), "x", budget)
    assert caught.value.code == "string_above_max_length"
    assert unseal(seal(""), "x", budget) == ""


def test_a_sealed_text_over_the_limit_is_refused_before_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encrypted_content.base64, "b64decode", None)
    with pytest.raises(RequestError) as caught:
        unseal("chorale1." + "A" * 8_000_000, "x")
    assert caught.value.code == "string_above_max_length"


def test_an_incompressible_text_of_the_whole_budget_is_read() -> None:
    text = base64.b64encode(zlib.compress(b"x") + bytes(range(256)) * 12_000).decode()[: MAX_BYTES - 1]
    assert unseal(seal(text), "x") == text
