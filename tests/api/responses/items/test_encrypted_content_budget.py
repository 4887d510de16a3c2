"""The sealed texts of a request share a budget, beyond which nothing is unpacked."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import pytest

from chorale.api.responses.items import encrypted_content
from chorale.api.responses.items.encrypted_content import MAX_BYTES, Budget, seal, unseal
from chorale.api.responses.items.input import parse_items
from chorale.errors import RequestError

BOMB = "chorale1." + base64.b64encode(zlib.compress(b"a" * (MAX_BYTES - 1), 9)).decode()


class Meter:
    """Replaces ``zlib`` and counts the unpacked bytes."""

    error = zlib.error

    def __init__(self) -> None:
        self.unpacked = 0

    def decompressobj(self) -> Any:
        return _Metered(self, zlib.decompressobj())


class _Metered:
    def __init__(self, meter: Meter, inner: Any) -> None:
        self._meter, self._inner = meter, inner

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    def decompress(self, data: bytes, most: int) -> bytes:
        assert most > 0, "0 means no limit"
        found: bytes = self._inner.decompress(data, most)
        self._meter.unpacked += len(found)
        return found


def item(text: str = BOMB) -> dict[str, Any]:
    return {"type": "compaction", "encrypted_content": text}


@pytest.mark.parametrize("count", [2, 3000])
def test_at_most_the_budget_is_unpacked_for_any_number_of_items(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter()
    monkeypatch.setattr(encrypted_content, "zlib", meter)
    with pytest.raises(RequestError) as caught:
        parse_items([item()] * count)
    assert caught.value.param == "input[1].encrypted_content"
    assert caught.value.code == "string_above_max_length"
    assert meter.unpacked <= MAX_BYTES + 1


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
