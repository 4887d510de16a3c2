"""The chat page in a real browser, against the whole app with scripted model output."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from chorale.api.operator.page import DEMO_EXAMPLES, _template
from chorale.config.engine import ToolConfig, hash_key
from chorale.harmony.vocab import load_vocabulary
from chorale.testing.scripted_client import ScriptedClient
from tests.support.scripted import ANALYSIS, FINAL, NEXT, call, in_rounds, playing
from tests.support.browsers.chromium import PATH, Page
from tests.support.server import in_thread, with_server

browser = pytest.mark.skipif(PATH is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    found = Page(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@contextlib.contextmanager
def served(
    client: ScriptedClient, keys: tuple[bytes, ...] = (), tools: ToolConfig | None = None
) -> Iterator[str]:
    """Runs the app in a thread and yields its address."""
    with in_thread(client, keys=keys, tools=tools) as server:
        yield f"http://127.0.0.1:{server.port}/"


def opened(page: Page, url: str) -> Page:
    page.open("about:blank")  # the previous page polls a server that has ended, and logs errors
    page.until("location.href === 'about:blank'")
    page.console.clear()
    page.call("Network.clearBrowserCookies")
    page.open(url)
    page.until("document.readyState === 'complete' && typeof model !== 'undefined' && model")
    return page


@browser
def test_a_question_is_answered_and_its_reasoning_is_folded(page: Page) -> None:
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
def test_model_output_never_becomes_markup(page: Page) -> None:
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
def test_the_policy_blocks_foreign_scripts_and_requests(page: Page) -> None:
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


DEMO = ToolConfig(servers=("demo",), browser="offline")
PAGE = "https://sample.chorale.invalid/sea-otters"
TOOL_ROUNDS = (
    '<|channel|>analysis to=browser.search code<|message|>{"query":"sea otter hairs"}<|call|>',
    '<|channel|>analysis to=browser.open code<|message|>{"id":0}<|call|>',
    "<|channel|>analysis to=python code<|message|>print(6 * 7)<|call|>",
    FINAL + "A million【1†L4-L5】 and **42**【1†L4】.<|return|>",
)


def ticked(page: Page, *names: str) -> None:
    page.value(
        "document.querySelectorAll('#tools label').forEach(label => {"
        f"if ({json.dumps(names)}.includes(label.innerText) !== label.firstChild.checked) label.click(); }})"
    )


@browser
@pytest.mark.usefixtures("python_sandbox")
def test_tool_calls_are_shown_with_their_results(page: Page) -> None:
    """Model output is scripted; the search, the page, its citation and python are real."""
    with served(in_rounds(*TOOL_ROUNDS), tools=DEMO) as url:
        names = opened(page, url).text("#tools label")
        assert names == ["Web search", "Python"]
        ticked(page, *names)
        page.send("How many hairs, and 6 * 7?")
        page.until("document.querySelector('.stats')")
        assert page.text("details.tool summary") == [
            "Searched: sea otter hairs",
            f"Opened {PAGE}",
            "Ran Python",
        ]
        page.value("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
        search, opening, python = page.text("details.tool .body")
        assert "Sea otters" in search
        assert opening == PAGE
        assert python.split() == ["print(6", "*", "7)", "Output", "42"]
        links = "[...document.querySelectorAll('a.cite')].map(n => [n.innerText, n.href, n.target, n.rel])"
        link = ["sample.chorale.invalid", PAGE, "_blank", "noreferrer noopener"]
        assert page.value(links) == [link, link]
        assert page.text(".answer") == [f"A million{link[0]} and 42{link[0]}."]
        assert page.console == []


@browser
def test_a_failed_tool_is_marked_and_unfolds_to_nothing(page: Page) -> None:
    rounds = (
        '<|channel|>analysis to=browser.open code<|message|>{"id":7}<|call|>',
        FINAL + "Sorry.<|return|>",
    )
    with served(in_rounds(*rounds), tools=DEMO) as url:
        ticked(opened(page, url), "Web search")
        page.send("Open the seventh")
        page.until("document.querySelector('.stats')")
        assert page.text("details.tool.broken summary") == ["Opening a page (failed)"]
        page.click("details.tool summary")
        assert page.value("document.querySelector('details.tool .body').getBoundingClientRect().height") == 0


@browser
@pytest.mark.usefixtures("python_sandbox")
def test_an_example_enables_its_tool_and_a_server_without_tools_has_no_toggles(page: Page) -> None:
    client = in_rounds(FINAL + "yes<|return|>")
    with served(client, tools=DEMO) as url:
        ticked(opened(page, url), "Web search")
        page.click("#examples button:last-child")
        page.until("document.querySelector('.stats')")
        prompt = load_vocabulary().decode(client.requests[0].prompt_token_ids)
        assert "## python" in prompt
        assert "## browser" not in prompt
    with served(playing(FINAL + "x<|return|>")) as url:
        opened(page, url)
        assert page.value("document.getElementById('tools').getBoundingClientRect().width") == 0
        assert page.text("#examples button") == list(DEMO_EXAMPLES)


@browser
def test_internal_citation_marks_in_a_text_are_not_citations(page: Page) -> None:
    with served(playing(FINAL + "a \u20635\u2063 b<|return|>")) as url:
        opened(page, url).send("x")
        page.until("document.querySelector('.stats')")
        assert page.text(".answer") == ["a 5 b"]
        assert page.console == []


@browser
@pytest.mark.parametrize("tab", ["chat", "server"])
def test_the_page_fits_the_width_of_a_phone(page: Page, tab: str) -> None:
    answer = "`" + "x" * 300 + "`\n\n| a | b |\n|---|---|\n| " + "y" * 200 + " | " + "z" * 200 + " |"
    try:
        page.call(
            "Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True
        )
        with served(playing(FINAL + answer + "<|return|>")) as url:
            opened(page, url).send("w" * 300)
            page.until("document.querySelector('.stats')")
            page.click(f"#tab-{tab}")
            page.until("history.length >= 1 && last")
            assert page.value("document.documentElement.scrollWidth") <= 390
            assert page.value("document.getElementById('log').scrollWidth") <= 390
            assert page.value("document.getElementById('server').scrollWidth") <= 390
    finally:
        page.call(
            "Emulation.setDeviceMetricsOverride", width=1100, height=800, deviceScaleFactor=1, mobile=False
        )


@browser
def test_a_wrong_key_shows_an_error(page: Page) -> None:
    with served(playing(FINAL + "open<|return|>"), (hash_key("sesame"),)) as url:
        page.console.clear()
        page.open(url)
        page.until("document.querySelector('#key')")
        assert page.value("document.querySelector('#key .error').hidden") is True
        page.value("document.querySelector('#key input').value = 'simsim'")
        page.click("#key button")
        page.until("document.querySelector('#key .error') && !document.querySelector('#key .error').hidden")
        page.value("sessionStorage.clear()")


@browser
def test_stop_ends_a_stream_and_new_chat_clears_the_thread(page: Page) -> None:
    with served(playing(FINAL + "word " * 400 + "<|return|>", delay=0.02)) as url:
        opened(page, url).send("Go on")
        page.until("document.querySelector('.answer') && !document.getElementById('stop').hidden")
        page.click("#stop")
        page.until("document.getElementById('stop').hidden")
        assert "Stopped." in page.text(".turn.assistant")[0]
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
        page.until("!document.getElementById('send').hidden")  # the answer ends after its statistics appear
        page.send("two")
        page.until("document.querySelectorAll('.stats').length === 2")
    prompts = [load_vocabulary().decode(each.prompt_token_ids) for each in client.requests]
    assert "Reasoning: high" in prompts[0]
    assert "one" in prompts[1]
    assert "yes" in prompts[1]
    assert "two" in prompts[1]


@browser
def test_errors_are_shown(page: Page) -> None:
    with served(playing(FINAL + "x<|return|>")) as url:
        opened(page, url)
        page.value("model = 'no-such-model'")
        page.send("hello")
        page.until("document.querySelector('.error')")
        assert "no-such-model" in page.text(".error")[0]
        page.until("!document.getElementById('send').hidden")


@browser
def test_the_page_asks_for_a_key_and_keeps_it_in_the_tab(page: Page) -> None:
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
def test_the_server_tab_shows_tiles_and_charts(page: Page, tmp_path: Path) -> None:
    with served(playing(FINAL + "word " * 20 + "<|return|>")) as url:
        opened(page, url).click("#tab-server")
        page.until("document.querySelectorAll('.chart text').length === 30")
        assert page.value("[...document.querySelectorAll('.chart text')].map(n => n.textContent)")[:5] == [
            "0",
            "1",
            "2",
            "3",
            "4",
        ]  # the axis without data
        page.click("#tab-chat")
        page.send("hello")
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
    answer = with_server(playing(), lambda server: server.http.get("/"))
    text, policy = answer.text, answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert "innerHTML" not in _template()[0]
    assert "</script>" not in json.dumps(text.split('id="settings">')[1].split("</script>")[0])
