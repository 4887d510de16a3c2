"""The page for people, in a real browser, against the whole app; the model's words are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium import PATH, Page
from scripted_helpers import ANALYSIS, FINAL, NEXT, call, playing
from shell_helpers import Running, full_server, make_state

from chorale.api.app import create_app
from chorale.api.auth import hash_key
from chorale.api.page import _template
from chorale.client.scripted import ScriptedClient

Serve = Callable[..., Running]
browser = pytest.mark.skipif(PATH is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    found = Page(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@contextlib.contextmanager
def served(client: ScriptedClient, keys: tuple[bytes, ...] = ()) -> Iterator[str]:
    """The app in a thread of its own; yields its address."""
    started: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    async def main() -> None:
        async with full_server(client, keys) as server:
            started.append(f"http://127.0.0.1:{server.port}/")
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(10)
        yield started[0]
    finally:
        stop.set()
        thread.join()


def opened(page: Page, url: str) -> Page:
    page.console.clear()
    page.call("Network.clearBrowserCookies")
    page.open(url)
    page.until("document.readyState === 'complete' && typeof model !== 'undefined' && model")
    return page


@browser
def test_a_question_is_answered_and_its_reasoning_folds(page: Page) -> None:
    answer = (
        ANALYSIS
        + "17 and 25 are 42."
        + NEXT
        + FINAL
        + "It is **42**.\n\n- one\n- two\n\n```py\nx = 1\n```<|return|>"
    )
    with served(playing(answer)) as url:
        opened(page, url).send("What is 17 + 25?")
        page.until("document.querySelector('.stats')")
        assert page.text(".user") == ["What is 17 + 25?"]
        assert page.text(".answer strong") == ["42"]
        assert page.text(".answer li") == ["one", "two"]
        assert page.text(".answer pre") == ["x = 1"]
        assert page.value("document.querySelector('details.thought').open") is False
        assert re.match(r"Thought for \d+\.\d s", page.text("details.thought summary")[0])
        assert (
            page.value("document.querySelector('details.thought .body').textContent") == "17 and 25 are 42."
        )
        assert re.match(r"\d+ tokens · \d+ tok/s · first after \d+ ms", page.text(".stats")[0])
        assert page.console == []


@browser
def test_what_a_model_writes_never_becomes_markup(page: Page) -> None:
    evil = "<img src=x onerror=alert(1)> <script>alert(2)</script> [go](javascript:alert(3)) `<b>`"
    with served(playing(FINAL + evil + "<|return|>")) as url:
        opened(page, url).send("<i>hello</i>")
        page.until("document.querySelector('.stats')")
        assert page.text(".user") == ["<i>hello</i>"]
        assert (
            page.value(
                "document.querySelectorAll('.turn img, .turn script, .turn i, .turn b, .turn a').length"
            )
            == 0
        )
        assert evil.replace("`", "") in page.text(".answer")[0]


@browser
def test_the_policy_refuses_what_is_not_ours(page: Page) -> None:
    with served(playing(FINAL + "x<|return|>")) as url:
        opened(page, url)
        page.value("(() => { const s = document.createElement('script'); s.textContent = 'window.bad = 1';"
                   " document.body.append(s); })()")  # fmt: skip
        assert page.value("window.bad") is None
        refused = "fetch('http://127.0.0.1:9/').then(() => 'sent', error => error.name)"
        assert page.value(refused) == "TypeError"
        page.until("true")
        assert any("Content Security Policy" in line for line in page.console)


@browser
def test_function_calls_are_shown(page: Page) -> None:
    with served(playing(call("get_weather", '{"city": "Paris"}') + "<|call|>")) as url:
        opened(page, url)
        page.value(
            "document.getElementById('tools').innerHTML = '<input type=checkbox checked>';"
            "document.querySelector('#tools input').value = JSON.stringify("
            "{type: 'function', name: 'get_weather', parameters: {type: 'object'}})"
        )
        page.send("Weather in Paris?")
        page.until("document.querySelector('.stats')")
        assert page.text("details.tool summary") == ["Call get_weather"]
        assert json.loads(page.value("document.querySelector('details.tool pre').textContent")) == {
            "city": "Paris"
        }


@browser
def test_stop_ends_a_stream_and_new_chat_forgets(page: Page) -> None:
    with served(playing(FINAL + "word " * 400 + "<|return|>", delay=0.02)) as url:
        opened(page, url).send("Go on")
        page.until("document.querySelector('.answer') && !document.getElementById('stop').hidden")
        page.click("#stop")
        page.until("document.getElementById('stop').hidden")
        assert "stopped" in page.text(".turn.assistant")[0]
        page.click("#new")
        assert page.text(".turn") == []
        assert page.value("document.getElementById('hello').hidden") is False


@browser
def test_effort_and_the_thread_reach_the_server(page: Page) -> None:
    client = playing(FINAL + "yes<|return|>")
    with served(client) as url:
        opened(page, url)
        page.value("document.getElementById('effort').value = 'high'")
        page.send("one")
        page.until("document.querySelectorAll('.stats').length === 1")
        page.send("two")
        page.until("document.querySelectorAll('.stats').length === 2")
    from chorale.harmony.vocab import load_vocabulary

    prompts = [load_vocabulary().decode(each.prompt_token_ids) for each in client.requests]
    assert "Reasoning: high" in prompts[0]
    assert "one" in prompts[1]
    assert "yes" in prompts[1]
    assert "two" in prompts[1]


@browser
def test_errors_are_said(page: Page) -> None:
    with served(playing(FINAL + "x<|return|>")) as url:
        opened(page, url)
        page.value("model = 'no-such-model'")
        page.send("hello")
        page.until("document.querySelector('.error')")
        assert "no-such-model" in page.text(".error")[0]
        page.until("!document.getElementById('send').hidden")


@browser
def test_a_key_is_asked_for_and_kept_in_the_tab(page: Page) -> None:
    with served(playing(FINAL + "open<|return|>"), (hash_key("sesame"),)) as url:
        page.open(url)
        page.until("document.querySelector('#key')")
        page.value("document.querySelector('#key input').value = 'sesame'")
        page.click("#key button")
        page.until("typeof model !== 'undefined' && model")
        page.send("hello")
        page.until("document.querySelector('.stats')")
        assert page.text(".answer") == ["open"]
        assert page.value("localStorage.length") == 0
        page.value("sessionStorage.clear()")


@browser
def test_the_operator_sees_the_load(page: Page, tmp_path: Path) -> None:
    with served(playing(FINAL + "word " * 20 + "<|return|>")) as url:
        opened(page, url).send("hello")
        page.until("document.querySelector('.stats')")
        page.click("#tab-server")
        page.until("document.querySelectorAll('.tile').length === 8 && history.length >= 2 && last", 10)
        page.until("document.querySelectorAll('.tile')[4].innerText.startsWith('1')", 10)
        assert page.value("document.querySelectorAll('.chart svg').length") == 6
        titles = page.value(
            "[...document.querySelectorAll('.chart svg')].map(n => n.getAttribute('aria-label'))"
        )
        assert "KV cache in use, %" in titles
        assert page.console == []
        page.screenshot(tmp_path / "server.png")
        assert (tmp_path / "server.png").stat().st_size > 10_000


def test_the_page_is_served_with_its_policy_and_fetches_nothing() -> None:
    async def main() -> tuple[str, dict[str, str]]:
        import httpx2

        async with make_state() as state:
            transport = httpx2.ASGITransport(create_app(state))
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                answer = await client.get("/")
        return answer.text, dict(answer.headers)

    text, headers = asyncio.run(main())
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert "innerHTML" not in _template()[0]
    assert "</script>" not in json.dumps(text.split('id="settings">')[1].split("</script>")[0])
