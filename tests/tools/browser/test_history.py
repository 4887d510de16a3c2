"""The browser's cursors as a state that travels with a response: bounded, the newest pages whole."""

from __future__ import annotations

import json

from chorale.tools.browser.history import History
from chorale.tools.browser.page import Page
from chorale.tools.contract import Link


def search(number: int, size: int) -> Page:
    links = {0: Link(f"https://example.com/{number}", f"Result {number}", None)}
    return Page(f"search:{number}", f"Search {number}", "x" * size, "search", links)


def test_old_search_pages_lose_their_text_before_the_state_grows_too_large() -> None:
    history = History()
    for number in range(40):
        history.add(search(number, 10_000))
    state = history.state()
    assert len(state) == 40
    assert len(json.dumps(state)) < 200_000
    kept = ["text" in record for record in state]
    assert kept == sorted(kept)  # the newest ones
    assert 5 < sum(kept) < 20
    restored = History.restored(json.loads(json.dumps(state)))
    assert restored.entry(-1).page == search(39, 10_000)
    assert restored.entry(0).page is None
    assert restored.entry(0).title == "Search 0"
