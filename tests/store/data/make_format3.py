"""Makes ``format3.*``: a response store as the version before format 4 wrote it, and what that version answered.

For the record only: it ran on the tree of commit 67c9489 (the last with format 3), with that version's own
scripted engine and test helpers, and uses the public HTTP API for everything that it stores::

    cd TREE && PYTHONPATH=.:tests/api:tests/api/responses:tests/api/tools python make_format3.py FILE ANSWERS.json

``FILE`` is an SQLite file or a postgresql:// URL. A first server stores what ends, and leaves one response
waiting in an orderly shutdown. A second server begins responses, and is killed with SIGKILL. Afterwards
``VACUUM INTO`` (SQLite) or ``pg_dump --inserts --schema=chorale`` (PostgreSQL) and gzip made the committed
files. A third run (``COPY ANSWERS.json restart``) records what that version does with the killed server's
responses when it starts again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from functools import partial

import httpx2
from responses_helpers import CALL, HELLO, MODEL, TOOL, VOCAB, tokens
from scripted_tools import ScriptedService
from starlette.routing import Router

from chorale.api.app import all_routes
from chorale.api.auth import guard_routes
from chorale.api.metrics import Metrics
from chorale.api.responses.access import Access
from chorale.api.responses.postgres import connect
from chorale.api.responses.store import Bounds, SqliteStore, SqlStore
from chorale.api.shell import Shell, unknown_path
from chorale.api.state import ServerState
from chorale.client.base import EngineInfo
from chorale.client.scripted import Script, ScriptedClient
from chorale.config import ServerConfig
from chorale.errors import EngineDeadError

FINAL = "<|channel|>final<|message|>"
PYTHON = "<|channel|>analysis to=python code<|message|>print(42)<|call|>"
SEARCH = '<|channel|>analysis to=browser.search code<|message|>{"query": "tides"}<|call|>'
MCP = '<|channel|>commentary to=wiki.echo <|constrain|>json<|message|>{"text":"hi"}<|call|>'
SHELL = (
    "<|channel|>commentary to=functions.shell <|constrain|>json<|message|>"
    '{"commands":["ls -l","echo \\"a\\""]}<|call|>'
)
CITED = f"{FINAL}As 【0†L1-L2】 says, 21 °C.<|return|>"
FOUND = [{"type": "web_search"}]
CODE = [{"type": "code_interpreter", "container": {"type": "auto"}}]
WIKI = [{"type": "mcp", "server_label": "wiki", "server_url": "https://wiki.test/mcp", "require_approval": "never"}]


class Maker:
    def __init__(self, place: str) -> None:
        self.place = place
        self.scripts: list[Script] = []
        self.answers: dict[str, dict] = {"responses": {}, "conversations": {}, "completions": {}}

    def store(self):
        if self.place.startswith("postgres"):
            return SqlStore(Access(partial(connect, self.place), Bounds(ttl=1e12)))
        return SqliteStore(self.place, Bounds(ttl=1e12))

    @asynccontextmanager
    async def serving(self):
        client = ScriptedClient(
            lambda request, index: self.scripts.pop(0),
            info_value=EngineInfo(model="scripted", max_model_len=131072, max_num_seqs=256),
        )
        store = self.store()
        config = ServerConfig(system_start_date="2026-01-02")
        state = ServerState(client, config, VOCAB, Metrics(MODEL), store, (MODEL,), tools=ScriptedService())
        router = Router(guard_routes(all_routes(state), ()), redirect_slashes=False, default=unknown_path)
        app = Shell(router, state, False)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://t") as self.http:
            yield state
        await state.background.close(store)
        await client.close()
        await store.close()

    async def get(self, path: str, **headers: str):
        answer = await self.http.get(path, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def ask(self, name: str, scripts: list, **body) -> str:
        self.scripts = [s if isinstance(s, Script) else Script(tokens(s)) for s in scripts]
        stream = body.pop("stream", False)
        if stream:
            events = (await self.http.post("/v1/responses", json={"model": MODEL, "stream": True, **body})).text
            made = json.loads(events.partition("data: ")[2].partition("\n")[0])["response"]
        else:
            answer = await self.http.post("/v1/responses", json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
            made = answer.json()
        self.answers["responses"][name] = {"id": made["id"]}
        return made["id"]

    async def settled(self, response_id: str, *statuses: str) -> None:
        while (await self.get(f"/v1/responses/{response_id}")).json()["status"] not in statuses:
            await asyncio.sleep(0.01)

    async def read(self, name: str, events: bool = True) -> None:
        """What the server answers about a response that has ended."""
        kept = self.answers["responses"][name]
        path = f"/v1/responses/{kept['id']}"
        kept["body"] = (await self.get(path)).json()
        kept["input_items"] = (await self.get(f"{path}/input_items")).json()
        if events:
            kept["events"] = (await self.get(f"{path}?stream=true")).text
            for dialect in ("open-responses", "summary") if name in ("logprobs", "failed") else ():
                answer = await self.get(f"{path}?stream=true", **{"x-responses-dialect": dialect})
                kept[f"events_{dialect}"] = answer.text

    async def ended(self, name: str, scripts: list, **body) -> str:
        made = await self.ask(name, scripts, background=True, **body)
        await self.settled(made, "completed", "failed", "incomplete", "cancelled")
        await self.read(name)
        return made

    async def first_server(self) -> None:
        dead = Script(tokens(HELLO)[:8], error=EngineDeadError("the engine died"))
        first = await self.ended("text", [HELLO], input="hello", metadata={"a": "b"})
        await self.ended("chained", [HELLO], input="and now?", previous_response_id=first)
        await self.ended("logprobs", [Script(tokens(HELLO), with_logprobs=True)], input="x", top_logprobs=1,
                         include=["message.output_text.logprobs"])
        await self.ended("encrypted", [HELLO], input="x", include=["reasoning.encrypted_content"])
        await self.ended("summary", [HELLO], input="x", reasoning={"summary": "auto"})
        await self.ended("hidden", [HELLO], input="x", include_reasoning=False)
        await self.ended("call", [CALL], input="weather?", tools=[TOOL])
        await self.ended("shell", [SHELL], input="ls", tools=[{"type": "shell", "environment": {"type": "local"}}])
        await self.ended("incomplete", [Script(tokens(HELLO)[:9], finish_reason="length")], input="x")
        await self.ended("failed", [dead], input="x")
        await self.ended("web", [SEARCH, CITED], input="tides?", tools=FOUND)
        await self.ended("python", [PYTHON, HELLO], input="6*7?", tools=CODE,
                         include=["code_interpreter_call.outputs"])
        await self.ended("mcp", [MCP, HELLO], input="echo", tools=WIKI)
        made = await self.ask("cancelled", [Script(tokens(HELLO)[:8], hang=True)], input="x", background=True)
        await self.settled(made, "in_progress")
        await asyncio.sleep(0.2)
        await self.http.post(f"/v1/responses/{made}/cancel")
        await self.read("cancelled")
        await self.ask("plain", [HELLO], input="not in the background")
        await self.read("plain", events=False)
        made = (await self.http.post("/v1/conversations", json={"metadata": {"k": "v"}, "items": [
            {"type": "message", "role": "user", "content": "We talk."}]})).json()["id"]
        await self.ended("conversation", [HELLO], input="hello", conversation=made)
        await self.ask("conversation_plain", [CALL], input="weather?", conversation=made, tools=[TOOL])
        await self.read("conversation_plain", events=False)
        self.answers["conversations"][made] = {
            "object": (await self.get(f"/v1/conversations/{made}")).json(),
            "items": (await self.get(f"/v1/conversations/{made}/items?order=asc")).json(),
        }
        for label in "ab":
            self.scripts = [Script(tokens(HELLO))]
            body = {"messages": [{"role": "user", "content": label}], "store": True, "metadata": {"is": label}}
            made = (await self.http.post("/v1/chat/completions", json=body)).json()["id"]
            path = f"/v1/chat/completions/{made}"
            self.answers["completions"][made] = {
                "object": (await self.get(path)).json(),
                "messages": (await self.get(f"{path}/messages")).json(),
            }
        await self.ask("waiting", [Script(tokens(HELLO)[:8], hang=True)], input="I waited.", background=True)
        await asyncio.sleep(0.3)

    async def second_server(self) -> None:
        held = (await self.http.post("/v1/conversations", json={})).json()["id"]
        self.answers["held"] = held
        await self.ask("queued", [Script([], hang=True, delay=60)], input="I was queued.", background=True)
        await self.ask("unread", [Script(tokens(HELLO)[:8], hang=True)], input="Nobody read me.", background=True)
        await self.ask("in_conversation", [Script(tokens(HELLO)[:8], hang=True)], input="I am part of it.",
                       background=True, conversation=held)
        await self.ask("acted", [PYTHON, Script(tokens(HELLO)[:13], hang=True)], input="6*7?", tools=CODE,
                       background=True)
        await self.ask("half_call", [Script(tokens(CALL)[:-3], hang=True)], input="weather?", tools=[TOOL],
                       background=True)
        seen = await self.ask("seen", [Script(tokens(HELLO)[:13], hang=True)], input="x", background=True)
        await asyncio.sleep(0.5)
        # Over ASGI a stream cannot be read in part: a reader who is cut shows what was there.
        for name, made in (("seen", seen), ("half_call", self.answers["responses"]["half_call"]["id"])):
            reading = asyncio.create_task(self.http.get(f"/v1/responses/{made}?stream=true"))
            await asyncio.sleep(0.5)
            reading.cancel()
        for name in ("queued", "unread", "in_conversation", "acted", "half_call", "seen"):
            await self.read(name, events=False)


async def main(place: str, answers: str) -> None:
    maker = Maker(place)
    async with maker.serving() as state:
        await maker.first_server()
        await state.background.put_back(state.store)
        await maker.read("waiting", events=False)
    async with maker.serving():
        await maker.second_server()
        with open(answers, "w") as out:
            json.dump(maker.answers, out, indent=1, ensure_ascii=False)
        os.kill(os.getpid(), signal.SIGKILL)


async def restart(place: str, answers: str) -> None:
    """What that version made of the killed server's responses when it started again, on a copy of the file."""
    maker = Maker(place)
    with open(answers) as given:
        maker.answers = json.load(given)
    async with maker.serving():
        for name in ("acted", "half_call", "seen"):
            maker.answers["responses"][name + "_restarted"] = {"id": maker.answers["responses"][name]["id"]}
            await maker.read(name + "_restarted")
        with open(answers, "w") as out:
            json.dump(maker.answers, out, indent=1, ensure_ascii=False)
        os.kill(os.getpid(), signal.SIGKILL)


asyncio.run((restart if sys.argv[3:] else main)(sys.argv[1], sys.argv[2]))
