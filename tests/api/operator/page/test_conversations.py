"""Conversations on the chat page: the list, branches, stopping and continuing, errors."""

from __future__ import annotations

import json
from typing import Any

from chorale.engine.types import GenerateRequest
from chorale.errors import EngineError
from tests.support.browsers.chat_page import (
    answered,
    ask,
    fill,
    give_file,
    module,
    opened,
    prompts,
    reloaded,
    shown,
)  # fmt: skip
from tests.support.browsers.tab import Tab
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.scripted import FINAL, ids, in_rounds, playing
from tests.support.server import in_thread

TITLES = "[...document.querySelectorAll('#list .open')].map(node => node.textContent)"


def numbered() -> ScriptedClient:
    """Returns a client that answers "answer 1", "answer 2" and so on."""
    return in_rounds(*(f"{FINAL}answer {n}<|return|>" for n in range(1, 9)))


def agree(tab: Tab) -> None:
    tab.until("document.querySelector('#ask').open")
    tab.click("#ask-yes")


# --------------------------------------------------------------------------- the list


def test_conversations_survive_a_reload_and_can_be_searched(tab: Tab) -> None:
    with in_thread(numbered()) as server:
        ask(opened(tab, server), "The first question\nwith two lines")
        tab.click("#new")
        assert shown(tab) == []
        ask(tab, "Another question")
        ask(tab, "And more", answers=2)
        reloaded(tab)
        tab.until("document.querySelectorAll('.turn').length === 4")
        assert shown(tab) == ["Another question", "answer 2", "And more", "answer 3"]
        tab.until(f"({TITLES}).length === 2")
        assert tab.value(TITLES) == ["Another question", "The first question"]
        fill(tab, "#search", "ANSWER 1")  # in a message
        tab.until(f"({TITLES}).length === 1")
        assert tab.value(TITLES) == ["The first question"]
        fill(tab, "#search", "nothing has this")
        tab.until(f"({TITLES}).length === 0")
        fill(tab, "#search", "")
        tab.until(f"({TITLES}).length === 2")
        tab.click("#list li:last-child .open")
        tab.until("document.querySelectorAll('.turn').length === 2")
        assert shown(tab) == ["The first question\nwith two lines", "answer 1"]
        assert tab.value("document.title").startswith("The first question")


def test_a_conversation_is_renamed_and_deleted_here_and_on_the_server(tab: Tab) -> None:
    with in_thread(numbered()) as server:
        ask(opened(tab, server), "one")
        kept = tab.value(f"{module('store.js')}.then(store => store.allMessages())")
        response = next(message["response"] for message in kept if message["role"] == "assistant")
        tab.click(".entry-actions button:nth-child(1)")
        fill(tab, "#list input", "A better title")
        tab.press("Enter")
        tab.until(f"({TITLES})[0] === 'A better title'")
        status = f"fetch('/v1/responses/{response}').then(answer => answer.status)"
        assert tab.value(status) == 200
        tab.click(".entry-actions button:nth-child(3)")
        agree(tab)
        tab.until(f"({TITLES}).length === 0 && !document.querySelector('.turn')")
        tab.until(f"{status}.then(found => found === 404)")
        reloaded(tab)
        tab.until("document.getElementById('list-note').textContent")
        assert tab.value(TITLES) == []


def test_deletion_is_asked_for(tab: Tab) -> None:
    with in_thread(numbered()) as server:
        ask(opened(tab, server), "one")
        tab.click("#delete-all")
        tab.until("document.querySelector('#ask').open")
        tab.click("#ask button[value=no]")
        tab.until("!document.querySelector('#ask').open")
        assert tab.value(TITLES) == ["one"]


def exported(tab: Tab, button: str) -> Any:
    """Returns the content of the file that a button saves."""
    tab.run("URL.createObjectURL = blob => { window.saved = blob; return 'data:,'; }")
    tab.click(button)
    tab.until("window.saved")
    return json.loads(tab.value("window.saved.text()"))


def test_all_conversations_are_exported_deleted_and_imported(tab: Tab) -> None:
    with in_thread(numbered()) as server:
        ask(opened(tab, server), "one")
        tab.click("#new")
        ask(tab, "two")
        file = exported(tab, "#export")
        assert [each["title"] for each in file["conversations"]] == ["two", "one"]
        tab.click("#delete-all")
        agree(tab)
        tab.until(f"({TITLES}).length === 0")
        for text in ("Imported 2", "2 were here"):  # the second time, nothing is added
            give_file(tab, "#import-file", ("export.json", json.dumps(file)))
            tab.until(f"document.getElementById('toast').textContent.includes({json.dumps(text)})")
        assert tab.value(TITLES) == ["two", "one"]
        tab.click("#list li:last-child .open")
        tab.until("document.querySelectorAll('.turn').length === 2")
        assert shown(tab) == ["one", "answer 1"]
        ask(tab, "more", answers=2)
    assert "answer 1" in prompts(server.client)[-1]


DAMAGED = (
    "no JSON",
    '{"format": "other"}',
    '{"format": "chorale-conversations", "version": 1,'
    ' "conversations": [{"id": "a", "title": "t", "updated": 1, "chosen": {}, "messages": [{}]}]}',
)


def test_a_damaged_import_adds_nothing(tab: Tab) -> None:
    with in_thread(numbered()) as server:
        page = opened(tab, server)
        for text in DAMAGED:
            tab.value("document.getElementById('toast').textContent = ''")
            give_file(page, "#import-file", ("export.json", text))
            tab.until("document.getElementById('toast').textContent.startsWith('Import failed.')")
            assert tab.value(TITLES) == []


# --------------------------------------------------------------------------- branches


def test_editing_and_regenerating_make_branches(tab: Tab) -> None:
    with in_thread(numbered()) as server:
        ask(opened(tab, server), "red")
        tab.click("[aria-label='Regenerate the answer']")
        tab.until("document.querySelector('.answer')?.innerText.trim() === 'answer 2'")
        answered(tab)
        assert tab.text(".count") == ["2/2"]
        ask(tab, "more", answers=2)
        tab.click("[aria-label='Edit the message']")
        fill(tab, ".editor textarea", "blue")
        tab.click(".editor .solid")
        tab.until("document.querySelector('.bubble')?.innerText === 'blue'")
        answered(tab)
        assert shown(tab) == ["blue", "answer 4"]
        tab.click(".user [aria-label='Previous version']")
        assert shown(tab) == ["red", "answer 2", "more", "answer 3"]
        tab.click(".assistant [aria-label='Previous version']")
        assert shown(tab) == ["red", "answer 1"]
        ask(tab, "again", answers=2)
        reloaded(tab)
        tab.until("document.querySelectorAll('.turn').length === 4")
        assert shown(tab) == ["red", "answer 1", "again", "answer 5"]
        last = prompts(server.client)[-1]
    assert "red" in last
    assert "answer 1" in last
    assert not any(word in last for word in ("blue", "answer 2", "more"))


# --------------------------------------------------------------------------- stop, continue, retry


def test_a_stopped_answer_is_kept_and_continued(tab: Tab) -> None:
    client = in_rounds(
        FINAL + "one two three" + " and on" * 300 + "<|return|>",
        FINAL + "x<|return|>",
        delay=0.02,
    )
    with in_thread(client) as server:
        opened(tab, server).send("Count")
        tab.until("document.querySelector('.answer')?.innerText.includes('three and on and')")
        tab.click("#stop")
        answered(tab)
        stopped = tab.text(".answer")[0].strip()
        assert len(stopped) < 2000
        tab.until("document.querySelector('.continue:not([disabled])')")
        client.source = lambda request, index: Script(ids(" the end.<|return|>"))
        tab.click(".continue")
        tab.until("document.querySelector('.answer').innerText.includes('the end.')")
        answered(tab)
        assert shown(tab) == ["Count", f"{stopped} the end."]
        client.source = lambda request, index: Script(ids(FINAL + "yes<|return|>"))
        ask(tab, "Well?", answers=2)
    _, continued, after = prompts(client)
    assert continued.endswith(f"<|start|>assistant<|channel|>final<|message|>{stopped}")
    assert f"{stopped} the end.<|end|>" in after


def test_an_answer_that_reached_the_limit_is_continued(tab: Tab) -> None:
    client = playing(FINAL + "one two")
    with in_thread(client) as server:
        ask(opened(tab, server), "Count")
        assert tab.count(".state-line .note") == 1
        client.source = lambda request, index: Script(ids(" three<|return|>"))
        tab.click(".continue")
        tab.until("document.querySelector('.answer').innerText.includes('three')")
        answered(tab)
        assert shown(tab) == ["Count", "one two three"]
        assert tab.count(".continue") == 0


def test_after_an_error_the_question_and_the_beginning_stay(tab: Tab) -> None:
    failing = Script(ids(FINAL + "The beginning"), error=EngineError("the engine broke"))

    def source(request: GenerateRequest, index: int) -> Script:
        return failing if len(client.requests) < 2 else Script(ids(FINAL + "right<|return|>"))

    client = ScriptedClient(source)
    with in_thread(client) as server:
        ask(opened(tab, server), "one")
        assert shown(tab) == ["one", "The beginning"]
        assert "the engine broke" in tab.text(".turn .error")[0]
        tab.run("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve(); }")
        tab.click("[aria-label='Copy the answer']")
        assert tab.value("window.copied") == "The beginning"
        reloaded(tab)
        tab.until("document.querySelector('.retry:not([disabled])')")
        tab.until(
            "document.querySelector('#dot.ready') && document.getElementById('model').textContent === 'demo'"
        )
        tab.click(".retry")
        tab.until("document.querySelector('.answer')?.innerText.trim() === 'right'")
        answered(tab)
        assert shown(tab) == ["one", "right"]


def test_a_refused_request_leaves_the_question_with_retry(tab: Tab) -> None:
    with in_thread(numbered(), names=("demo",)) as server:
        opened(tab, server)
        tab.value(f"{module('chat.js')}.then(chat => chat.setServer('no-such-model', 1e6))")
        ask(tab, "hello")
        assert shown(tab) == ["hello"]
        assert "no-such-model" in tab.text(".turn .error")[0]
        tab.value(f"{module('chat.js')}.then(chat => chat.setServer('demo', 1e6))")
        tab.click(".retry")
        tab.until("document.querySelector('.answer')")
        answered(tab)
        assert shown(tab) == ["hello", "answer 1"]
        assert tab.count(".branches") == 0
