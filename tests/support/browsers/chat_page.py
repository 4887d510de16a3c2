"""The chat page in a browser: how tests open it, ask, and read the answers."""

from __future__ import annotations

import json
from typing import Any

from chorale.harmony.vocab import load_vocabulary
from tests.support.browsers.tab import Tab
from tests.support.engine.scripted_client import ScriptedClient
from tests.support.server import Server

READY = "document.querySelector('#dot.ready') && document.querySelector('#examples button:not(:disabled)')"
IDLE = "document.getElementById('stop').hidden"
ANSWERED = ".turn.assistant .foot-line:not([hidden])"
TURNS = "[...document.querySelectorAll('.turn .bubble, .turn .answer')].map(node => node.innerText.trim())"


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/"


def opened(tab: Tab, server: Server, path: str = "") -> Tab:
    """Opens the page of a new server, and waits until questions can be asked."""
    leave(tab)
    tab.open(url(server) + path)
    tab.until(READY)
    return tab


def leave(tab: Tab) -> None:
    """Leaves a page, which polls a server that has ended, and logs errors."""
    tab.open("about:blank")
    tab.until("location.href === 'about:blank'")
    tab.console.clear()


def reloaded(tab: Tab) -> None:
    tab.reload()
    tab.until("document.querySelector('#dot')")


def ask(tab: Tab, text: str, *, answers: int = 1) -> None:
    """Sends a message and waits until so many answers are shown and complete."""
    tab.send(text)
    answered(tab, answers)


def answered(tab: Tab, answers: int = 1) -> None:
    tab.until(f"document.querySelectorAll({json.dumps(ANSWERED)}).length === {answers} && {IDLE}")


def shown(tab: Tab) -> list[str]:
    """Returns the texts of the messages, from the first to the last."""
    return list(tab.value(TURNS))


def module(name: str) -> str:
    """Returns an expression for a module of the page, which is the instance that the page uses."""
    return f"import(document.querySelector('script[type=module]').src.replace('main.js', '{name}'))"


def give_file(tab: Tab, selector: str, *files: tuple[str, str]) -> None:
    """Chooses files in a file input. Each has a name, and a content of which each character is a byte."""
    tab.run(
        "const chosen = new DataTransfer();"
        f"for (const [name, text] of {json.dumps(files)})"
        " chosen.items.add(new File([Uint8Array.from(text, c => c.charCodeAt(0))], name));"
        f"const input = document.querySelector({json.dumps(selector)});"
        "input.files = chosen.files; input.dispatchEvent(new Event('change'));"
    )


def fill(tab: Tab, selector: str, value: Any) -> None:
    """Types into a field."""
    tab.run(
        f"const field = document.querySelector({json.dumps(selector)}); field.value = {json.dumps(value)};"
        "field.dispatchEvent(new Event(field.tagName === 'SELECT' ? 'change' : 'input', {bubbles: true}));"
    )


def prompts(client: ScriptedClient) -> list[str]:
    return [load_vocabulary().decode(each.prompt_token_ids) for each in client.requests]
