"""The chat page while the server loads, restarts, is away, asks for a key, or is behind a proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorale.client.base import EngineStatus
from chorale.config.engine import hash_key
from tests.store.test_locked import opened as locked_store
from tests.store.test_locked import write_lock
from tests.support.browsers.chat_page import (
    READY,
    answered,
    ask,
    fill,
    leave,
    module,
    opened,
    prompts,
    reloaded,
    shown,
    url,
)  # fmt: skip
from tests.support.browsers.tab import Tab
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.ports import free_port
from tests.support.scripted import FINAL, ids, in_rounds, playing
from tests.support.server import in_thread

SLOW = FINAL + " ".join(f"w{n}" for n in range(60)) + "<|return|>"
WHOLE = " ".join(f"w{n}" for n in range(60))
BEGUN = "document.querySelector('.answer')?.innerText.includes('w3')"


def test_the_page_waits_for_the_model(tab: Tab) -> None:
    client = playing(FINAL + "yes<|return|>")
    client.status_value = EngineStatus("loading", "load", 0.43)
    with in_thread(client) as server:
        leave(tab)
        tab.open(url(server))
        tab.until("document.querySelector('#dot.loading') && document.querySelector('#examples button')")
        assert "43 %" in tab.text("#banner")[0]
        assert tab.value("document.querySelector('#banner progress').value") == 0.43
        assert tab.value("document.querySelector('#examples button').disabled") is True
        tab.send("hello")  # too early: the text stays
        assert tab.value("document.getElementById('text').value") == "hello"
        client.status_value = EngineStatus("loading", "warm_up")
        tab.until("!document.getElementById('banner').innerText.includes('43')")
        client.status_value = EngineStatus("ready")
        tab.until(f"{READY} && document.getElementById('banner').hidden")
        tab.click("#send")
        answered(tab)
        assert shown(tab) == ["hello", "yes"]
        assert tab.console == [] or all("503" in line for line in tab.console)


def test_the_page_survives_a_restart(tab: Tab) -> None:
    port = free_port()
    client = in_rounds(FINAL + "answer 1<|return|>", FINAL + "answer 2<|return|>")
    with in_thread(client, port=port) as server:
        ask(opened(tab, server), "one")
    tab.until("document.querySelector('#dot.away') && !document.getElementById('banner').hidden")
    assert shown(tab) == ["one", "answer 1"]
    with in_thread(client, port=port):  # a new store: the history comes from the page
        tab.until("document.querySelector('#dot.ready') && document.getElementById('banner').hidden")
        ask(tab, "two", answers=2)
        assert shown(tab)[-1] == "answer 2"
    assert "answer 1" in prompts(client)[-1]


def test_a_response_in_progress_is_resumed_after_a_reload(tab: Tab) -> None:
    script = Script(ids(SLOW), delay=0.05)
    client = ScriptedClient(lambda request, index: script)
    with in_thread(client) as server:
        opened(tab, server).send("Count")
        tab.until(BEGUN)
        reloaded(tab)
        script.delay = 0.0
        answered(tab)
        assert shown(tab) == ["Count", WHOLE]
        assert tab.count(".state-line p") == 0
    assert len(client.requests) == 1


def test_a_response_is_resumed_when_its_conversation_is_opened_again(tab: Tab) -> None:
    script = Script(ids(SLOW), delay=0.03)
    with in_thread(ScriptedClient(lambda request, index: script)) as server:
        opened(tab, server).send("Count")
        tab.until(BEGUN)
        tab.click("#new")
        assert shown(tab) == []
        assert tab.value("document.getElementById('stop').hidden") is True
        tab.click("#list .open")
        tab.until(BEGUN)
        script.delay = 0.0
        answered(tab)
        assert shown(tab) == ["Count", WHOLE]


def test_what_arrived_stays_if_the_server_has_lost_the_response(tab: Tab) -> None:
    port = free_port()
    client = playing(SLOW, delay=0.1)
    with in_thread(client, port=port) as server:
        opened(tab, server).send("Count")
        tab.until(BEGUN)
        tab.value(f"{module('store.js')}.then(store => store.open())")
    with in_thread(client, port=port):
        tab.until("document.querySelector('.turn .error')")
        answered(tab)
        question, beginning = shown(tab)
        assert question == "Count"
        assert WHOLE.startswith(beginning)
        assert "w3" in beginning
        client.source = lambda request, index: Script(ids(" the end<|return|>"))
        tab.until("document.querySelector('#dot.ready')")
        tab.click(".continue")
        tab.until("document.querySelector('.answer').innerText.includes('the end')")
        answered(tab)
        assert shown(tab)[1] == beginning + " the end"


def test_a_server_that_cannot_store_answers_without_resuming(tab: Tab, tmp_path: Path) -> None:
    file = tmp_path / "responses.sqlite3"
    with in_thread(playing(SLOW, delay=0.1), store=locked_store(file)) as server:
        opened(tab, server)
        with write_lock(file):
            tab.send("Count")
            tab.until(BEGUN)
            kept = "all.some(each => each.status === 'running' && each.items.length)"
            tab.until(f"{module('store.js')}.then(store => store.allMessages()).then(all => {kept})")
            reloaded(tab)
            tab.until("document.querySelector('.turn .error')")
        question, beginning = shown(tab)
        assert question == "Count"
        assert WHOLE.startswith(beginning)


# --------------------------------------------------------------------------- keys and paths


def test_the_page_asks_for_a_key_and_keeps_it_in_the_tab(tab: Tab) -> None:
    with in_thread(playing(FINAL + "open<|return|>"), keys=(hash_key("sesame"),)) as server:
        leave(tab)
        tab.open(url(server))
        tab.until("document.querySelector('#key')?.open")
        assert tab.value("document.querySelector('#key-error').hidden") is True
        fill(tab, "#key-input", "simsim")
        tab.click("#key button")
        tab.until("document.querySelector('#key')?.open && !document.querySelector('#key-error').hidden")
        fill(tab, "#key-input", "sesame")
        tab.click("#key button")
        tab.until(READY)
        ask(tab, "hello")
        assert shown(tab) == ["hello", "open"]
        assert tab.value("Object.values(localStorage).some(value => value.includes('sesame'))") is False
        reloaded(tab)
        tab.until("document.querySelector('#dot.ready') && document.querySelector('.turn')")
        assert tab.value("document.querySelector('#key')?.open") is False


@pytest.mark.parametrize("path", ["llm/", "llm"])
def test_the_page_works_below_a_path(tab: Tab, path: str) -> None:
    with in_thread(playing(FINAL + "yes<|return|>"), root_path="/llm") as server:
        ask(opened(tab, server, path), "hello")
        assert shown(tab) == ["hello", "yes"]
