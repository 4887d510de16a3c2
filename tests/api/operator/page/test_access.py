"""The chat page for keyboards, screen readers, phones and dark rooms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chorale.config.engine import ToolConfig, hash_key
from tests.support.browsers import axe
from tests.support.browsers.chat_page import ask, leave, opened, url
from tests.support.browsers.tab import Tab
from tests.support.scripted import ANALYSIS, FINAL, NEXT, in_rounds, playing
from tests.support.server import Server, in_thread

LONG = (
    "`" + "x" * 300 + "` $" + "x+" * 80 + "x$\n\n```py\n" + "y" * 200 + "\n```\n\n| a | b |\n|---|---|\n| "
    + "y" * 200 + " | " + "z" * 200 + " |"
)  # fmt: skip
ROUNDS = (
    f"{ANALYSIS}I search.{NEXT}"
    '<|channel|>analysis to=browser.search code<|message|>{"query":"otter"}<|call|>',
    f"{FINAL}{LONG}<|return|>",
)
WIDTHS = (
    "[document.documentElement, ...document.querySelectorAll('#log, #server, #settings, #sidebar')]"
    ".map(node => node.scrollWidth - node.clientWidth)"
)
HEARD = "document.getElementById('live').textContent"


@pytest.fixture
def server() -> Iterator[Server]:
    """A server with a tool, whose answer has every kind of content."""
    with in_thread(in_rounds(*ROUNDS), tools=ToolConfig(browser="offline")) as found:
        yield found


def asked(tab: Tab, server: Server) -> None:
    opened(tab, server).click("#tools input")
    ask(tab, "w" * 300)
    tab.run("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")


@pytest.mark.parametrize(("width", "dark"), [(1100, False), (375, True)])
def test_axe_finds_no_violation(tab: Tab, server: Server, width: int, dark: bool) -> None:
    tab.darken(dark)
    tab.resize(width, 800)
    opened(tab, server)
    assert tab.value("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    assert axe.violations(tab) == []
    asked(tab, server)
    assert axe.violations(tab) == []
    tab.click("[aria-label='Edit the message']")
    assert axe.violations(tab) == []
    tab.click("#tab-server")
    tab.until("document.querySelectorAll('.chart svg.chart-plot').length === 6")
    assert axe.violations(tab) == []
    for button in ("#open-settings", "#open-sidebar"):
        tab.click(button)
        assert axe.violations(tab) == []
        tab.press("Escape")


def test_axe_finds_no_violation_in_the_dialogs(tab: Tab, server: Server) -> None:
    opened(tab, server).click("#delete-all")
    tab.until("document.querySelector('#ask').open")
    assert axe.violations(tab) == []
    with in_thread(playing(FINAL), keys=(hash_key("sesame"),)) as locked:
        leave(tab)
        tab.open(url(locked))
        tab.until("document.querySelector('#key')?.open")
        assert axe.violations(tab) == []


@pytest.mark.parametrize("width", [320, 820])
def test_nothing_is_wider_than_the_window(tab: Tab, server: Server, width: int) -> None:
    tab.resize(width, 740)
    opened(tab, server)
    assert not any(tab.value(WIDTHS))
    asked(tab, server)
    assert not any(tab.value(WIDTHS))
    tab.click("#open-sidebar")
    assert not any(tab.value(WIDTHS))
    tab.click("#shade")
    tab.click("#tab-server")
    tab.until("document.querySelectorAll('.chart svg.chart-plot').length === 6")
    assert not any(tab.value(WIDTHS))
    tab.click("#open-settings")
    assert not any(tab.value(WIDTHS))


def test_tabs_follow_the_arrow_keys(tab: Tab, server: Server) -> None:
    opened(tab, server).run("document.getElementById('tab-chat').focus()")
    for key, name in (
        ("ArrowRight", "server"), ("ArrowRight", "chat"), ("ArrowLeft", "server"), ("Home", "chat"),
        ("End", "server"),
    ):  # fmt: skip
        tab.press(key)
        assert tab.value("document.activeElement.id") == f"tab-{name}"
        assert tab.value(
            "[...document.querySelectorAll('[role=tab][aria-selected=true]')].map(n => n.id)"
        ) == [f"tab-{name}"]
        assert tab.value(f"document.getElementById('{name}').getAttribute('role')") == "tabpanel"
        assert tab.value(f"document.getElementById('{name}').hidden") is False


def test_a_screen_reader_hears_the_answer_once(tab: Tab, server: Server) -> None:
    with in_thread(playing(FINAL + "one two three<|return|>", delay=0.02)) as slow:
        opened(tab, slow)
        tab.run(
            f"window.heard = []; new MutationObserver(() => heard.push({HEARD}))"
            ".observe(document.getElementById('live'), {childList: true})"
        )
        ask(tab, "hello")
        tab.until("heard.length === 2")
        assert tab.value("heard")[1] == "Answer: one two three"
        assert tab.count("#log [aria-live], #log [role=status]") == 0


def test_a_narrow_window_keeps_the_focus_in_the_open_list(tab: Tab, server: Server) -> None:
    tab.resize(375, 740)
    opened(tab, server).click("#open-sidebar")
    assert tab.value("document.getElementById('page').inert") is True
    assert tab.value("document.activeElement.closest('aside')?.id") == "sidebar"
    tab.press("Escape")
    assert tab.value("document.getElementById('sidebar').inert") is True
    assert tab.value("document.activeElement.id") == "open-sidebar"
