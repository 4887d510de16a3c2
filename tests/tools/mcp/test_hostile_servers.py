"""Dead, slow and lying MCP servers: the model reads what went wrong, and the response goes on."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorale.config.engine import ToolConfig
from chorale.errors import ConfigError
from chorale.tools.contract import McpProgress, McpRequest, RequestTools, ToolCall, ToolResult
from chorale.tools.mcp.client import McpClient, McpLimits
from chorale.tools.mcp.events import Event, EventReader
from chorale.tools.mcp.servers import (
    client_of,
    from_flag,
    from_request,
    namespace_name,
    read_mcp_config,
    session_header,
)
from chorale.tools.mcp.transport import Stdio
from chorale.tools.mcp.wire import McpError, decode
from chorale.tools.service import start_tools
from tests.support import ROOT
from tests.support.event_loop import run
from tests.support.tools.drive import count_words
from tests.support.tools.local_http import Handler, answer, serve

LIAR = ROOT / "tests" / "support" / "tools" / "stdio_liar.py"
LIMITS = McpLimits(connect_seconds=2.0, call_seconds=1.0)


def liar(kind: str, *more: str) -> McpClient:
    return McpClient([lambda: Stdio([sys.executable, "-S", str(LIAR), kind, *more], {})], LIMITS)


def talk(kind: str) -> tuple[list[str], object]:
    """Names of tools, then the outcome of a call to ``echo``."""

    async def work() -> tuple[list[str], object]:
        client = liar(kind)
        try:
            await client.connect()
            names = [tool.name for tool in await client.list_tools()]
            items = [item async for item in client.call("echo", {"t": "x"}, "call_1")]
            return names, items
        finally:
            await client.aclose()

    return run(work())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("silent", "no handshake within 2 s"),
        ("garbage", "not JSON"),
        ("version", "revision '1999-01-01'"),
        ("many", "more than 128 tools"),
        ("endless", "more than 20 pages"),
        ("dies", "program ended"),
        ("hangs", "no answer within 1 s"),
        ("floods", "more than 4194304 bytes"),
        ("no-result", "without a result"),
    ],
)
def test_faults_of_a_program(kind: str, reason: str) -> None:
    started = time.monotonic()
    with pytest.raises(McpError, match=reason):
        talk(kind)
    assert time.monotonic() - started < 60  # of the 600 s that some of them would take


def test_odd_but_usable_programs() -> None:
    assert talk("odd")[0] == ["a b", "a.b", "echo"]
    assert talk("wide")[0] == ["echo"]
    assert talk("wrong-id")[1][-1].text == "right"  # type: ignore[index]
    assert talk("odd-id")[1][-1].text == "right"  # type: ignore[index]
    note, _ = talk("huge-progress")[1]  # type: ignore[misc]
    assert note == McpProgress("m", None, None)
    assert talk("asks")[0] == ["echo"]
    chatter = talk("chatter")[1]
    assert sum(isinstance(item, McpProgress) for item in chatter) > 0  # type: ignore[union-attr]
    plain = talk("plain")[1][-1]  # type: ignore[index]
    assert plain.text == (
        "one\n[image of type image/png: not shown]\ntwo\n[n](https://e.org/)\n"
        "[content of type strange: not shown]"
    )
    assert talk("error")[1][-1].is_error  # type: ignore[index]


def test_a_reply_while_a_program_is_ended_starts_no_second_one(tmp_path: Path) -> None:
    """A server may ask something when its input ends."""
    starts = tmp_path / "starts"
    program = (
        "import json, sys\n"
        f"open({str(starts)!r}, 'a').write('x')\n"
        "hello = {'id': 1, 'result': {'protocolVersion': '2025-11-25'}}\n"
        "for line in sys.stdin: print(json.dumps(hello), flush=True)\n"
        "print(json.dumps({'id': 'q', 'method': 'ping'}), flush=True)\n"
    )

    async def work() -> None:
        client = McpClient([lambda: Stdio([sys.executable, "-S", "-c", program], {})], LIMITS)
        await client.connect()
        await client.aclose()

    run(work())
    assert starts.read_text() == "x"


def test_nobody_stays_connected_when_opening_is_cancelled(tmp_path: Path) -> None:
    """One server had answered, one had not: the first one's program ran on."""
    file = tmp_path / "mcp.json"
    command = [sys.executable, "-S", str(LIAR)]
    file.write_text(
        json.dumps(
            {
                "mcpServers": {
                    kind: {"command": command[0], "args": [*command[1:], kind]}
                    for kind in ("plain", "silent")
                }
            }
        )
    )

    async def work() -> None:
        service = await start_tools(ToolConfig(mcp_config=str(file)), {}, count_words)
        request = RequestTools(mcp=(McpRequest("plain"), McpRequest("silent")))
        opening = asyncio.create_task(service.open(request, session_key="k"))
        while "plain" not in service._listings:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert children() == before
        await service.aclose()

    before = children()
    run(work())


def children() -> set[str]:
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}


def test_what_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    """It ends by itself when its input does; a process that it started would live on."""
    script = f"sleep 600 </dev/null >/dev/null 2>&1 & echo $! >{tmp_path}/pid; while read line; do :; done"

    async def work() -> None:
        client = McpClient([lambda: Stdio(["/bin/sh", "-c", script], {})], LIMITS)
        with pytest.raises(McpError, match="no handshake"):
            await client.connect()

    run(work())
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the process is still there")


def test_a_missing_program() -> None:
    async def work() -> None:
        client = McpClient([lambda: Stdio(["/nonexistent/program"], {})], LIMITS)
        with pytest.raises(McpError, match="does not start"):
            await client.connect()

    run(work())


# --------------------------------------------------------------------------- over HTTP


def rpc(body: object, **headers: str) -> Handler:
    return answer(body=json.dumps(body).encode(), content_type="application/json", **headers)


HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "x", "version": "1"}}


async def endless_event(writer: asyncio.StreamWriter, _head: bytes) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: ")
    for _ in range(200):
        writer.write(b"x" * 100_000)
        await writer.drain()


async def nothing(writer: asyncio.StreamWriter, _head: bytes) -> None:
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (answer("500 Internal Server Error", b"boom at 0x7f"), "status 500"),
        (answer("401 Unauthorized"), "status 401"),
        (answer("404 Not Found"), "status 404"),
        (answer(body=b"<html>"), "not JSON"),
        (answer(body=b"[" * 100_000), "not JSON"),
        (rpc({"jsonrpc": "2.0", "id": 99, "result": HELLO}), "without a request"),
        (rpc({"jsonrpc": "2.0", "id": 1, "error": {"code": -1, "message": "no"}}), "error: no"),
        (rpc(3), "not JSON-RPC"),
        (answer(body=b"x" * (5 * 2**20)), "more than 4194304 bytes"),
        (answer("307 Temporary Redirect", location="http://169.254.169.254/"), "another host"),
        (answer("307 Temporary Redirect", location="http://127.0.0.1:9/mcp"), "another host"),
        (answer("307 Temporary Redirect", location="/mcp"), "circles"),
        (endless_event, "more than 4194304 bytes"),
        (nothing, "no handshake within 2 s"),
        (answer(content_type="text/event-stream", body=b"data: 1\n\n"), "not JSON-RPC"),
        (answer(content_type="text/event-stream", body=b": bye\n\n"), "ended the stream"),
    ],
)
def test_faults_over_http(handler: Handler, reason: str) -> None:
    async def work() -> None:
        async with serve({"/mcp": handler}) as port:
            request = McpRequest("x", f"http://127.0.0.1:{port}/mcp")
            client = client_of(from_request(request), LIMITS, "key", allow_private=True)
            with pytest.raises(McpError, match=reason) as caught:
                await client.connect()
            assert "0x7f" not in caught.value.message

    run(work())


def test_a_body_without_an_end_is_left_after_four_mebibytes() -> None:
    """What was sent is counted: a check of the whole body would have read all of it."""
    num_sent = 0

    async def endless_json(writer: asyncio.StreamWriter, _head: bytes) -> None:
        nonlocal num_sent
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"')
        for _ in range(600):
            writer.write(b"x" * 100_000)
            num_sent += 100_000
            await writer.drain()

    async def work() -> None:
        async with serve({"/mcp": endless_json}) as port:
            request = McpRequest("x", f"http://127.0.0.1:{port}/mcp")
            client = client_of(from_request(request), LIMITS, "key", allow_private=True)
            with pytest.raises(McpError, match="more than 4194304 bytes"):
                await client.connect()

    run(work())
    assert num_sent < 30_000_000  # the limit, and what the buffers of two sockets hold


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "169.254.169.254", "[::1]", "2130706433", "10.0.0.1"]
)
def test_a_request_does_not_reach_private_hosts(host: str) -> None:
    async def work() -> None:
        service = await start_tools(ToolConfig(), {}, count_words)
        request = McpRequest("inside", f"http://{host}:9/mcp", authorization="t0ken")
        box = await service.open(RequestTools(mcp=(request,)), session_key="k")
        assert "not a public address" in (box.listings[0].error or "")
        assert "t0ken" not in str(box.listings)
        assert box.recipients == frozenset()
        assert box.developer_namespaces == ()
        await box.aclose()
        await service.aclose()

    run(work())


def test_a_rebinding_name_is_not_followed() -> None:
    async def work() -> None:
        touched: list[bytes] = []

        async def secret(writer: asyncio.StreamWriter, head: bytes) -> None:
            touched.append(head)

        async def resolve(host: str, port: int) -> Sequence[str]:
            return ["127.0.0.1"]

        async with serve({"/mcp": secret, "/sse": secret}) as port:
            server = from_request(McpRequest("x", f"http://public.example:{port}/mcp"))
            client = client_of(server, LIMITS, "key", allow_private=False, resolve=resolve)
            with pytest.raises(McpError, match="not a public address"):
                await client.connect()
        assert touched == []

    run(work())


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "x"}, {"content-length": "3"}, {"a b": "c"}, {"x": "a\r\nb: c"}, {"x\n": "y"}, {"": "y"},
        {"X": "é" * 9000}, {"Transfer-Encoding": "chunked"}, {"x": "日本"},
    ],
)  # fmt: skip
def test_headers_that_are_not_sent(headers: dict[str, str]) -> None:
    with pytest.raises(McpError, match="cannot be sent"):
        from_request(McpRequest("x", "https://e.org/mcp", headers=headers))


def test_headers_and_token_arrive() -> None:
    heads: list[str] = []

    async def record(writer: asyncio.StreamWriter, head: bytes) -> None:
        heads.append(head.decode("latin-1").lower())
        await answer("401 Unauthorized")(writer, head)

    async def work() -> None:
        async with serve({"/mcp": record}) as port:
            url = f"http://127.0.0.1:{port}/mcp"
            headers = {"X-Team": "otters", "X-Town": "Orléans"}
            request = McpRequest("x", url, headers=headers, authorization="t0ken")
            client = client_of(from_request(request), LIMITS, "chain key", allow_private=True)
            with pytest.raises(McpError):
                await client.connect()

    run(work())
    assert "x-team: otters" in heads[0]
    assert "x-town: orléans" in heads[0]
    assert "authorization: bearer t0ken" in heads[0]
    assert f"x-session-id: {session_header('chain key')}" in heads[0]
    assert "chain key" not in heads[0]


# --------------------------------------------------------------------------- labels, filters, files


@pytest.mark.parametrize("label", ["functions", "browser", "python", "Python", "", "--", "assistant"])
def test_labels_that_are_taken(label: str) -> None:
    with pytest.raises(McpError, match="cannot be the label"):
        namespace_name(label)


def test_labels_become_namespaces() -> None:
    assert namespace_name("my server/1") == "my_server_1"


def test_filters_and_approvals(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": ["-S", str(LIAR), "odd"]}
    file.write_text(json.dumps({"mcpServers": {"local": entry}}))

    async def work() -> None:
        service = await start_tools(ToolConfig(mcp_config=str(file)), {}, count_words)
        narrow = McpRequest("local", allowed_tools=frozenset({"a b"}), never_approve=frozenset({"a b"}))
        box = await service.open(RequestTools(mcp=(narrow,)), session_key="k")
        assert box.recipients == {"local.a_b"}
        assert box.identify("local.a_b").name == "a b"
        assert not box.identify("local.a_b").needs_approval
        assert box.owns("local.echo")  # a slip: the call fails and says what there is
        await box.aclose()
        twice = RequestTools(mcp=(McpRequest("local", require_approval=False), McpRequest("local")))
        box = await service.open(twice, session_key="k")
        assert [listing.error for listing in box.listings] == [None, "another server has this label"]
        # "a b" and "a.b" would be the same name: the first stays
        assert box.recipients == {"local.a_b", "local.echo"}
        assert not box.identify("local.echo").needs_approval
        unknown = await service.open(RequestTools(mcp=(McpRequest("other"),)), session_key="k")
        assert "unknown MCP server 'other'" in (unknown.listings[0].error or "")
        read_only = McpRequest("local", read_only=True)
        assert (await service.open(RequestTools(mcp=(read_only,)), session_key="k")).recipients == frozenset()
        await box.aclose()
        await service.aclose()

    run(work())


def test_a_cancelled_call_is_cancelled_in_the_server(tmp_path: Path) -> None:
    file = tmp_path / "received"

    def received(method: str) -> list[Any]:
        lines = file.read_text().splitlines() if file.exists() else []
        return [found for line in lines if (found := json.loads(line)).get("method") == method]

    async def until(method: str) -> Any:
        async with asyncio.timeout(20):
            while not received(method):
                await asyncio.sleep(0.02)
        return received(method)[0]

    async def work() -> None:
        client = liar("records", str(file))
        await client.connect()
        call = client.call("echo", {}, "t")
        task = asyncio.ensure_future(anext(call))
        number = (await until("tools/call"))["id"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await until("notifications/cancelled"))["params"]["requestId"] == number
        await call.aclose()
        await client.aclose()

    run(work())


def test_a_server_that_died_is_reached_again(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": ["-S", str(LIAR), "dies"]}
    file.write_text(json.dumps({"mcpServers": {"local": entry}}))

    async def work() -> None:
        service = await start_tools(ToolConfig(mcp_config=str(file)), {}, count_words)
        box = await service.open(RequestTools(mcp=(McpRequest("local"),)), session_key="k")
        for _ in range(2):
            events = [e async for e in box.call(ToolCall("local.echo", "{}", "c"))]
            assert isinstance(events[-1], ToolResult)
            assert events[-1].content == "Error: the server's program ended"
        await box.aclose()
        await service.aclose()

    run(work())


def test_a_program_that_ended_is_started_again_by_the_next_call(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": ["-S", str(LIAR), "dies-once", str(tmp_path / "died")]}
    file.write_text(json.dumps({"mcpServers": {"local": entry}}))

    async def work() -> None:
        service = await start_tools(ToolConfig(mcp_config=str(file)), {}, count_words)
        box = await service.open(RequestTools(mcp=(McpRequest("local"),)), session_key="k")
        found = []
        for _ in range(2):
            events = [e async for e in box.call(ToolCall("local.echo", "{}", "c"))]
            assert isinstance(events[-1], ToolResult)
            found.append(events[-1].content.splitlines()[0])
        assert found == ["Error: the server's program ended", "one"]
        await box.aclose()
        await service.aclose()

    run(work())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "mcpServers"),
        ('{"mcpServers": {"python": {"command": "x"}}}', "cannot be the label"),
        ('{"mcpServers": {"a b": {"command": "x"}}}', "a label may contain"),
        ('{"mcpServers": {"a": {}}}', "either command"),
        ('{"mcpServers": {"a": {"command": "x", "url": "http://e.org/"}}}', "either command"),
        ('{"mcpServers": {"a": {"command": "x", "cwd": "/"}}}', "either command"),
        ('{"mcpServers": {"a": {"url": "file:///x"}}}', "only http"),
        ('{"mcpServers": {"a": {"command": "x", "env": {"K": "${NOT_SET}"}}}}', "NOT_SET is not set"),
        ('{"mcpServers": {"a": {"command": 3}}}', "not a string"),
        ('{"mcpServers": {"a": {"command": "x", "args": "run.py"}}}', "args must be a list"),
        ('{"mcpServers": {"a": {"command": "x", "args": 5}}}', "args must be a list"),
        ('{"mcpServers": {"a": {"command": "x", "env": ["A=b"]}}}', "env must be an object"),
        ('{"mcpServers": {"a": {"url": "http://e.org/", "headers": 5}}}', "headers must be an object"),
        ('{"mcpServers": {"a": {"url": "http://e.org/", "headers": {"x": "日本"}}}}', "cannot be sent"),
    ],
)
def test_files_that_cannot_be_meant(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_mcp_config(str(file), {})


@pytest.mark.parametrize("entry", ["", "host", "host:x", "file:///x", "a b:1", "http://u:p@h/"])
def test_flags_that_cannot_be_meant(entry: str) -> None:
    with pytest.raises(ConfigError, match="--tool-server"):
        from_flag(entry)


# --------------------------------------------------------------------------- events


@given(
    st.lists(st.tuples(st.sampled_from(["", "endpoint", "x"]), st.text("ab:é \t", max_size=8)), max_size=5),
    st.data(),
)
def test_events_do_not_depend_on_how_they_arrive(events: list[tuple[str, str]], data: st.DataObject) -> None:
    wire = "".join(
        (f"event: {name}\r\n" if name else "") + f": note\ndata: {text}\n\n" for name, text in events
    )
    body, got, reader = wire.encode(), [], EventReader()
    while body:
        size = data.draw(st.integers(1, len(body)))
        got += reader.feed(body[:size])
        body = body[size:]
    assert got == [Event(name or "message", text) for name, text in events]


def test_half_a_surrogate_pair_from_a_server_can_be_passed_on() -> None:
    [message] = decode(b'{"jsonrpc": "2.0", "id": 1, "result": {"\\ud800": "a\\udc00"}}')
    assert message["result"] == {"\ufffd": "a\ufffd"}
