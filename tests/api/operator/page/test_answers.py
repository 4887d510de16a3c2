"""Answers on the chat page: text, reasoning, tools and figures, with scripted model output."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from chorale.api.operator.page import DEMO_EXAMPLES
from chorale.config.engine import ToolConfig
from chorale.engine.types import ChunkTimings, GenerateRequest, TokenChunk
from tests.support.browsers.chat_page import ask, opened, prompts
from tests.support.browsers.tab import Tab
from tests.support.engine.scripted_client import ScriptedClient
from tests.support.scripted import ANALYSIS, FINAL, NEXT, changing, in_rounds, playing
from tests.support.server import Server, in_thread

DEMO = ToolConfig(servers=("demo",), browser="offline")
ADDRESS = "https://sample.chorale.invalid/sea-otters"
TOOL_ROUNDS = (
    '<|channel|>analysis to=browser.search code<|message|>{"query":"sea otter hairs"}<|call|>',
    '<|channel|>analysis to=browser.open code<|message|>{"id":0}<|call|>',
    "<|channel|>analysis to=python code<|message|>print(6 * 7)<|call|>",
    FINAL + "A million【1†L4-L5】 and **42**【9†L4】.<|return|>",
)
FOLDS = "[...document.querySelectorAll('details.tool .title')].map(node => node.textContent)"


@pytest.fixture(scope="module")
def tooled() -> Iterator[Server]:
    """A server with the demo's tools."""
    with in_thread(in_rounds(*TOOL_ROUNDS), tools=DEMO) as server:
        yield server


def test_text_is_rendered_and_reasoning_is_folded(tab: Tab) -> None:
    text = "It is **42**, or $x^2$.\n\n- one\n\n```py\nx = 1\n```"
    with in_thread(playing(f"{ANALYSIS}17 and 25 are 42.{NEXT}{FINAL}{text}<|return|>")) as server:
        ask(opened(tab, server), "What is 17 + 25?")
        assert tab.text(".bubble") == ["What is 17 + 25?"]
        assert tab.text(".answer strong") == ["42"]
        assert tab.text(".answer li") == ["one"]
        assert tab.text(".answer figure.code code") == ["x = 1\n"]
        assert tab.count(".answer .katex") == 1
        assert tab.value("document.querySelector('details.thought').open") is False
        thought = tab.value("document.querySelector('details.thought .body').textContent")
        assert thought == "17 and 25 are 42."
        assert tab.text(".stats")[0].split()[1] == "tokens"
        assert tab.console == []


def test_output_never_becomes_markup(tab: Tab) -> None:
    evil = "<img src=x onerror=alert(1)> <script>alert(2)</script> [go](javascript:alert(3))"
    with in_thread(playing(f"{ANALYSIS}<i>a</i>{NEXT}{FINAL}{evil}<|return|>")) as server:
        ask(opened(tab, server), "<i>hello</i>")
        assert tab.text(".bubble") == ["<i>hello</i>"]
        assert tab.count(".turn :is(img, script, i, a)") == 0
        assert "<img src=x onerror=alert(1)>" in tab.text(".answer")[0]


@pytest.mark.usefixtures("python_sandbox")
def test_tool_calls_are_shown_with_their_results(tab: Tab, tooled: Server) -> None:
    """Model output is scripted; the search, the page, its citation and python are real."""
    tooled.client.requests.clear()
    opened(tab, tooled)
    assert tab.text("#tools label") == ["Web search (offline sample)", "Python"]
    tab.run("document.querySelectorAll('#tools input').forEach(box => box.click())")
    ask(tab, "How many hairs, and 6 * 7?")
    assert tab.value(FOLDS) == ["Searched: sea otter hairs", f"Opened {ADDRESS}", "Ran Python"]
    tab.run("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    search, opening, python = tab.text("details.tool .body")
    assert "Sea otters" in search
    assert opening.strip() == ADDRESS
    assert python.split() == ["print(6", "*", "7)", "Output", "42"]
    links = "[...document.querySelectorAll('a.cite')].map(n => [n.innerText, n.href, n.target, n.rel])"
    link = ["sample.chorale.invalid", ADDRESS, "_blank", "noreferrer noopener"]
    assert tab.value(links) == [link]
    assert tab.text(".answer") == [f"A million{link[0]} and 42."]  # the second mark leads nowhere
    assert "tokens/s" not in tab.text(".stats")[0]  # the engine's times include the tools
    assert tab.console == []


def test_a_failed_tool_is_marked_and_unfolds_to_nothing(tab: Tab) -> None:
    rounds = (
        '<|channel|>analysis to=browser.open code<|message|>{"id":7}<|call|>',
        FINAL + "Sorry.<|return|>",
    )
    with in_thread(in_rounds(*rounds), tools=ToolConfig(browser="offline")) as server:
        opened(tab, server).click("#tools input")
        ask(tab, "Open the seventh")
        assert tab.text("details.tool.broken .title") == ["Opening a page (failed)"]
        tab.click("details.tool summary")
        assert tab.value("document.querySelector('details.tool .body').getBoundingClientRect().height") == 0


@pytest.mark.usefixtures("python_sandbox")
def test_an_example_enables_its_tool_only(tab: Tab) -> None:
    client = in_rounds(FINAL + "yes<|return|>")
    with in_thread(client, tools=DEMO) as server:
        opened(tab, server).click("#tools input")
        tab.click("#examples button:last-child")
        tab.until("document.querySelector('.stats')")
    assert "## python" in prompts(client)[0]
    assert "## browser" not in prompts(client)[0]


def test_a_server_without_tools_has_no_toggles(tab: Tab) -> None:
    with in_thread(playing(FINAL + "x<|return|>")) as server:
        opened(tab, server)
        assert tab.count("#tools label, #set-tools label") == 0
        assert tab.text("#examples button") == list(DEMO_EXAMPLES)


@pytest.mark.usefixtures("python_sandbox")
def test_the_page_says_what_a_call_waits_for(tab: Tab, tooled: Server) -> None:
    tooled.client.requests[:] = tooled.client.requests[:1] * 2  # the next round calls python
    loop, pool = tooled.task.get_loop(), tooled.tools._pool
    tooled.tools._found.available["python"] += "; compiling"

    async def compiling() -> asyncio.Event:
        event = asyncio.Event()
        pool._first = asyncio.create_task(event.wait())
        return event

    compiled = asyncio.run_coroutine_threadsafe(compiling(), loop).result(10)
    opened(tab, tooled)
    tab.run("document.querySelectorAll('#tools input').forEach(box => { if (!box.checked) box.click(); })")
    tab.send("6 * 7?")
    tab.until("document.querySelector('.waiting')")
    assert "compiled" in tab.text(".waiting")[0]
    loop.call_soon_threadsafe(compiled.set)
    tab.until("document.querySelector('.stats') && !document.querySelector('.waiting')")


def timed(seconds: float) -> ScriptedClient:
    """Returns a client whose answer of 11 tokens took the engine so long after the first."""

    def change(request: GenerateRequest, chunk: TokenChunk) -> None:
        if chunk.timings is not None:
            now = chunk.timings.arrival
            chunk.timings = ChunkTimings(now, now, now + 0.25, now + 0.25 + seconds, 0)

    return changing(FINAL + "a b c d e f g<|return|>", change)


@pytest.mark.parametrize(("seconds", "speed"), [(0.5, "20 tokens/s"), (0.4, None)])
def test_the_speed_is_the_engines(tab: Tab, seconds: float, speed: str | None) -> None:
    with in_thread(timed(seconds)) as server:
        ask(opened(tab, server), "x")
        figures = tab.text(".stats")[0].split(" · ")
    assert figures == ["11 tokens", *([speed] if speed else []), "first token after 250 ms"]
