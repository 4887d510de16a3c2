"""Settings of the chat page, attached files, and the tab with the server's figures."""

from __future__ import annotations

import json

from tests.support.browsers.chat_page import answered, ask, fill, give_file, opened, prompts, reloaded, shown
from tests.support.browsers.tab import Tab
from tests.support.scripted import FINAL, playing
from tests.support.server import in_thread

FILES = "[...document.querySelectorAll('#files li')].map(node => node.firstChild.nextSibling.textContent)"
TOAST = "document.getElementById('toast').textContent"


def test_settings_reach_the_server_and_survive_a_reload(tab: Tab) -> None:
    client = playing(FINAL + "yes<|return|>")
    with in_thread(client) as server:
        opened(tab, server).click("#open-settings")
        tab.until("document.querySelector('#settings').open")
        fill(tab, "#set-instructions", "Answer in French.")
        fill(tab, "#set-effort", "high")
        fill(tab, "#set-temperature", "0.3")
        fill(tab, "#set-top_p", "0.8")
        fill(tab, "#set-max_output_tokens", "99")
        tab.press("Escape")
        tab.until("!document.querySelector('#settings').open")
        assert tab.value("document.getElementById('effort').value") == "high"
        ask(tab, "one")
        reloaded(tab)
        tab.until("document.getElementById('model').textContent === 'demo'")
        ask(tab, "two", answers=2)
    for request, prompt in zip(client.requests, prompts(client), strict=True):
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.3, 0.8, 99)
        assert "Reasoning: high" in prompt
        assert "Answer in French." in prompt


def test_an_invalid_number_is_marked_and_not_sent(tab: Tab) -> None:
    client = playing(FINAL + "yes<|return|>")
    with in_thread(client) as server:
        opened(tab, server).click("#open-settings")
        fill(tab, "#set-temperature", "0.5")
        fill(tab, "#set-temperature", "7")
        assert tab.value("document.querySelector('#set-temperature').ariaInvalid") == "true"
        assert tab.count("#settings-note.error") == 1
        tab.press("Escape")
        ask(tab, "one")
    assert client.requests[0].sampling.temperature == 0.5


# --------------------------------------------------------------------------- files


def test_attached_files_are_sent_with_the_message(tab: Tab) -> None:
    client = playing(FINAL + "yes<|return|>")
    with in_thread(client) as server:
        give_file(opened(tab, server), "#file", ("a.csv", "x;y\n1;2"), ("notes.md", "# Title"))
        tab.until("document.querySelectorAll('#files li').length === 2")
        assert tab.value(FILES) == ["a.csv", "notes.md"]
        tab.click("[aria-label='Remove notes.md']")
        ask(tab, "What is y?")
        assert tab.text(".turn .files li") == ["a.csv"]
        assert tab.count("#files li") == 0
        reloaded(tab)
        tab.until("document.getElementById('model').textContent === 'demo'")
        ask(tab, "And x?", answers=2)
    for prompt in prompts(client):
        assert "x;y\n1;2" in prompt
        assert "a.csv" in prompt
        assert "# Title" not in prompt


def test_a_pdf_file_is_sent(tab: Tab) -> None:
    with in_thread(playing(FINAL + "yes<|return|>")) as server:
        opened(tab, server)
        tab.run("const real = window.fetch; window.fetch = (path, options) => {"
                " if (options?.body) window.sent = options.body; return real(path, options); };")  # fmt: skip
        give_file(tab, "#file", ("a.pdf", "%PDF-1.4\n\xff\x00"))
        tab.until("document.querySelector('#files li')")
        tab.click("#send")
        answered(tab)  # whether it can be read is the server's matter
        (part,) = json.loads(tab.value("window.sent"))["input"][0]["content"]
    assert part["type"] == "input_file"
    assert part["filename"] == "a.pdf"
    assert part["file_data"].startswith("data:application/pdf;base64,")


def test_files_that_cannot_be_sent_are_refused_with_the_reason(tab: Tab) -> None:
    with in_thread(playing(FINAL + "yes<|return|>"), max_body_bytes=20_000) as server:
        opened(tab, server)
        for name, content, reason in (
            ("photo.png", "\x89PNG\r\n\x00\x01", "neither text in UTF-8 nor a PDF"),
            ("empty.txt", "", "is empty"),
            ("long.txt", "x" * 20_000, "is too large"),
        ):
            give_file(tab, "#file", (name, content))
            tab.until(f"{TOAST}.startsWith('{name}') && {TOAST}.includes('{reason}')")
        assert tab.count("#files li") == 0
        ask(tab, "y" * 6000)
        ask(tab, "y" * 6000, answers=2)
        ask(tab, "y" * 9000, answers=3)  # with the history, more than the server accepts
        assert "larger than this server accepts" in tab.text(".turn .error")[0]
        assert len(shown(tab)) == 5


# --------------------------------------------------------------------------- the server's figures


def test_the_server_tab_shows_figures_and_charts(tab: Tab) -> None:
    answer = FINAL + "word " * 20 + "<|return|>"
    with in_thread(playing(answer)) as server:
        ask(opened(tab, server), "hello")
        tab.click("#tab-server")
        tab.until("document.querySelectorAll('.chart svg.chart-plot').length === 6")
        tab.until("document.querySelectorAll('.tile')[4].innerText.startsWith('1')")
        titles = tab.text(".chart h2")
        assert "Time per output token, ms" in titles
        place = titles.index("KV cache in use, %")
        texts = f"document.querySelectorAll('.chart')[{place}].querySelectorAll('text')"
        axes = tab.value(f"[...{texts}].map(node => node.textContent)")
        assert axes[:5] == ["0 %", "25 %", "50 %", "75 %", "100 %"]
        assert {"now", "1 min ago"} <= set(axes[5:])
        since = "document.getElementById('since').textContent"
        tab.until(f"/^Updated every 2 s; showing the last [1-9][0-9]* s/.test({since})")
        assert tab.console == []
