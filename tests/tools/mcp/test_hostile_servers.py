"""Dead, slow and lying MCP servers: the model reads what went wrong, and the response goes on."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chorale.errors import ConfigError
from chorale.tools.contract import McpListing, McpProgress, McpRequest, McpToolInfo, RequestTools
from chorale.tools.mcp.client import McpClient, McpLimits
from chorale.tools.mcp.servers import (
    client_of,
    from_flag,
    from_request,
    namespace_name,
    read_mcp_config,
    session_header,
)
from chorale.tools.mcp.toolset import allowed
from chorale.tools.mcp.transport import Stdio
from chorale.tools.mcp.wire import McpError, decode
from tests.support import ROOT
from tests.support.event_loop import until
from tests.support.processes import children, is_running
from tests.support.tools.drive import box_of, drive, service_of
from tests.support.tools.local_http import Handler, answer, serve

LIAR = ROOT / "tests" / "support" / "tools" / "stdio_liar.py"
LIMITS = McpLimits(connect_seconds=20.0, call_seconds=10.0)
# For servers that never answer.
SHORT = McpLimits(connect_seconds=0.2, call_seconds=10.0)
SHORT_CALL = McpLimits(connect_seconds=20.0, call_seconds=0.2)


def liar(kind: str, *more: str, limits: McpLimits = LIMITS) -> McpClient:
    return McpClient([lambda: Stdio([sys.executable, "-S", str(LIAR), kind, *more], {})], limits)


def liars(tmp_path: Path, **kinds: str) -> str:
    """An operator's file with a program for each label; returns its path."""
    servers = {
        label: {"command": sys.executable, "args": ["-S", str(LIAR), *arguments.split()]}
        for label, arguments in kinds.items()
    }
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    return str(file)


async def talk(kind: str) -> tuple[list[str], Any]:
    """Names of tools, then the outcome of a call to ``echo``."""
    client = liar(kind, limits={"silent": SHORT, "hangs": SHORT_CALL}.get(kind, LIMITS))
    try:
        await client.connect()
        names = [tool.name for tool in await client.list_tools()]
        return names, [item async for item in client.run("echo", {"t": "x"}, "call_1")]
    finally:
        await client.aclose()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("silent", "no handshake within 0.2 s"),
        ("garbage", "not JSON"),
        ("version", "revision '1999-01-01'"),
        ("many", "more than 128 tools"),
        ("endless", "more than 20 pages"),
        ("dies", "program ended"),
        ("hangs", "no answer within 0.2 s"),
        ("floods", "more than 4194304 bytes"),
        ("no-result", "without a result"),
    ],
)
async def test_errors_of_a_program_raise(kind: str, reason: str) -> None:
    started = time.monotonic()
    with pytest.raises(McpError, match=reason):
        await talk(kind)
    assert time.monotonic() - started < 60  # of the 600 s that some of them would take


async def test_odd_but_usable_programs() -> None:
    for kind, names in (("odd", ["a b", "a.b", "echo"]), ("wide", ["echo"]), ("asks", ["echo"])):
        assert (await talk(kind))[0] == names
    for kind in ("wrong-id", "odd-id"):
        assert (await talk(kind))[1][-1].text == "right"
    note, _ = (await talk("huge-progress"))[1]
    assert note == McpProgress("m", None, None)
    assert any(isinstance(item, McpProgress) for item in (await talk("chatter"))[1])
    assert (await talk("plain"))[1][-1].text == (
        "one\n[image of type image/png: not shown]\ntwo\n[n](https://e.org/)\n"
        "[content of type strange: not shown]"
    )
    assert (await talk("error"))[1][-1].is_error


async def test_a_reply_while_a_program_is_ended_starts_no_second_one(tmp_path: Path) -> None:
    """A server may ask something when its input ends."""
    starts = tmp_path / "starts"
    program = (
        "import json, sys\n"
        f"open({str(starts)!r}, 'a').write('x')\n"
        "hello = {'id': 1, 'result': {'protocolVersion': '2025-11-25'}}\n"
        "for line in sys.stdin: print(json.dumps(hello), flush=True)\n"
        "print(json.dumps({'id': 'q', 'method': 'ping'}), flush=True)\n"
    )

    client = McpClient([lambda: Stdio([sys.executable, "-S", "-c", program], {})], LIMITS)
    await client.connect()
    await client.aclose()

    assert starts.read_text() == "x"


async def test_cancelling_open_closes_all_connections(tmp_path: Path) -> None:
    """One server had answered, one had not: the first one's program ran on."""
    before = children(os.getpid())
    request = RequestTools(mcp=(McpRequest("plain"), McpRequest("silent")))
    async with service_of(mcp_config=liars(tmp_path, plain="plain", silent="silent")) as service:
        opening = asyncio.create_task(service.open(request, session_key="k"))
        while "plain" not in service._listings:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert children(os.getpid()) == before


async def test_children_of_a_program_are_ended(tmp_path: Path) -> None:
    """It ends by itself when its input does; a process that it started would live on."""
    script = f"sleep 600 </dev/null >/dev/null 2>&1 & echo $! >{tmp_path}/pid; while read line; do :; done"

    client = McpClient([lambda: Stdio(["/bin/sh", "-c", script], {})], LIMITS)
    connecting = asyncio.create_task(client.connect())
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        await asyncio.sleep(0.01)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting

    left = int((tmp_path / "pid").read_text())
    await until(lambda: not is_running(left), "the end of the process", 2)


async def test_a_missing_program() -> None:
    client = McpClient([lambda: Stdio(["/nonexistent/program"], {})], LIMITS)
    with pytest.raises(McpError, match="does not start"):
        await client.connect()


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


async def refused(handler: Handler, reason: str, **fields: Any) -> None:
    """A client that connects to what ``handler`` serves fails with ``reason``."""
    async with serve({"/mcp": handler}) as port:
        request = McpRequest("x", f"http://127.0.0.1:{port}/mcp", **fields)
        limits = SHORT if handler is nothing else LIMITS
        client = client_of(from_request(request), limits, "chain key", allow_private=True)
        with pytest.raises(McpError, match=reason) as caught:
            await client.connect()
        assert "0x7f" not in caught.value.message


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
        (answer("307 Temporary Redirect", location="http://169.254.169.254/"), "another host"),
        (answer("307 Temporary Redirect", location="http://127.0.0.1:9/mcp"), "another host"),
        (answer("307 Temporary Redirect", location="/mcp"), "circles"),
        (endless_event, "more than 4194304 bytes"),
        (nothing, "no handshake within 0.2 s"),
        (answer(content_type="text/event-stream", body=b"data: 1\n\n"), "not JSON-RPC"),
        (answer(content_type="text/event-stream", body=b": bye\n\n"), "ended the stream"),
    ],
)
async def test_errors_over_http_raise(handler: Handler, reason: str) -> None:
    await refused(handler, reason)


async def test_an_endless_body_is_abandoned_after_four_mebibytes() -> None:
    """What was sent is counted: a check of the whole body would have read all of it."""
    num_sent = 0

    async def endless_json(writer: asyncio.StreamWriter, _head: bytes) -> None:
        nonlocal num_sent
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"')
        for _ in range(600):
            writer.write(b"x" * 100_000)
            num_sent += 100_000
            await writer.drain()

    await refused(endless_json, "more than 4194304 bytes")
    assert num_sent < 30_000_000  # the limit, and what the buffers of two sockets hold


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "169.254.169.254", "[::1]", "2130706433", "10.0.0.1"]
)
async def test_a_request_does_not_reach_private_hosts(host: str) -> None:
    request = RequestTools(mcp=(McpRequest("inside", f"http://{host}:9/mcp", authorization="t0ken"),))
    async with service_of() as service, box_of(service, request) as box:
        assert "not a public address" in (box.listings[0].error or "")
        assert "t0ken" not in str(box.listings)
        assert box.recipients == frozenset()
        assert box.developer_namespaces == ()


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "x"}, {"content-length": "3"}, {"a b": "c"}, {"x": "a\r\nb: c"}, {"x\n": "y"}, {"": "y"},
        {"X": "é" * 9000}, {"Transfer-Encoding": "chunked"}, {"x": "日本"},
    ],
)  # fmt: skip
def test_invalid_headers_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(McpError, match="cannot be sent"):
        from_request(McpRequest("x", "https://e.org/mcp", headers=headers))


async def test_headers_and_token_arrive() -> None:
    heads: list[str] = []

    async def record(writer: asyncio.StreamWriter, head: bytes) -> None:
        heads.append(head.decode("latin-1").lower())
        await answer("401 Unauthorized")(writer, head)

    headers = {"X-Team": "otters", "X-Town": "Orléans"}
    await refused(record, "status 401", headers=headers, authorization="t0ken")
    assert "x-team: otters" in heads[0]
    assert "x-town: orléans" in heads[0]
    assert "authorization: bearer t0ken" in heads[0]
    assert f"x-session-id: {session_header('chain key')}" in heads[0]
    assert "chain key" not in heads[0]


# --------------------------------------------------------------------------- labels, filters, files


@pytest.mark.parametrize("label", ["functions", "browser", "python", "Python", "", "--", "assistant"])
def test_labels_become_namespaces_unless_they_are_taken(label: str) -> None:
    assert namespace_name("my server/1") == "my_server_1"
    with pytest.raises(McpError, match="cannot be the label"):
        namespace_name(label)


async def test_filters_and_approvals(tmp_path: Path) -> None:
    async with service_of(mcp_config=liars(tmp_path, local="odd")) as service:
        narrow = McpRequest("local", allowed_tools=frozenset({"a b"}), never_approve=frozenset({"a b"}))
        async with box_of(service, RequestTools(mcp=(narrow,))) as box:
            assert box.recipients == {"local.a_b"}
            assert box.identify("local.a_b").name == "a b"
            assert not box.identify("local.a_b").needs_approval
            assert box.owns("local.echo")  # a slip: the call fails and says what there is
        twice = RequestTools(mcp=(McpRequest("local", require_approval=False), McpRequest("local")))
        async with box_of(service, twice) as box:
            assert [listing.error for listing in box.listings] == [None, "another server has this label"]
            # "a b" and "a.b" would be the same name: the first stays
            assert box.recipients == {"local.a_b", "local.echo"}
            assert not box.identify("local.echo").needs_approval
        async with box_of(service, RequestTools(mcp=(McpRequest("other"),))) as box:
            assert "unknown MCP server 'other'" in (box.listings[0].error or "")
        async with box_of(service, RequestTools(mcp=(McpRequest("local", read_only=True),))) as box:
            assert box.recipients == frozenset()


def test_only_tools_that_declare_it_are_read_only() -> None:
    hints = {"reads": {"readOnlyHint": True}, "writes": {"readOnlyHint": False}, "undeclared": None}
    listing = McpListing("local", tuple(McpToolInfo(name, None, {}, hint) for name, hint in hints.items()))
    kept = allowed(listing, McpRequest("local", read_only=True))
    assert [tool.name for tool in kept.tools] == ["reads"]


async def test_a_cancelled_call_is_cancelled_in_the_server(tmp_path: Path) -> None:
    file = tmp_path / "received"

    def received(method: str) -> list[Any]:
        lines = file.read_text().splitlines() if file.exists() else []
        return [found for line in lines if (found := json.loads(line)).get("method") == method]

    async def until(method: str) -> Any:
        async with asyncio.timeout(20):
            while not received(method):
                await asyncio.sleep(0.02)
        return received(method)[0]

    client = liar("records", str(file))
    await client.connect()
    call = client.run("echo", {}, "t")
    task = asyncio.ensure_future(anext(call))
    number = (await until("tools/call"))["id"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await until("notifications/cancelled"))["params"]["requestId"] == number
    await call.aclose()
    await client.aclose()


@pytest.mark.parametrize(
    ("kind", "second"), [("dies", "Error: the server's program ended"), ("dies-once", "one")]
)
async def test_a_program_that_ended_is_started_again_by_the_next_call(
    kind: str, second: str, tmp_path: Path
) -> None:
    config = liars(tmp_path, local=f"{kind} {tmp_path / 'died'}")
    request = RequestTools(mcp=(McpRequest("local"),))
    async with service_of(mcp_config=config) as service, box_of(service, request) as box:
        found = [(await drive(box.call, "local.echo", {}))[1].content.splitlines()[0] for _ in range(2)]
    assert found == ["Error: the server's program ended", second]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "mcpServers"),
        ({"a b": {"command": "x"}}, "a label may contain"),
        ({"python": {"command": "x"}}, "cannot be the label"),
        ({"a": {}}, "either command"),
        ({"a": {"command": "x", "url": "http://e.org/"}}, "either command"),
        ({"a": {"command": "x", "cwd": "/"}}, "either command"),
        ({"a": {"url": "file:///x"}}, "only http"),
        ({"a": {"command": "x", "env": {"K": "${NOT_SET}"}}}, "NOT_SET is not set"),
        ({"a": {"command": 3}}, "not a string"),
        ({"a": {"command": "x", "args": "run.py"}}, "args must be a list"),
        ({"a": {"command": "x", "args": 5}}, "args must be a list"),
        ({"a": {"command": "x", "env": ["A=b"]}}, "env must be an object"),
        ({"a": {"url": "http://e.org/", "headers": 5}}, "headers must be an object"),
        ({"a": {"url": "http://e.org/", "headers": {"x": "日本"}}}, "cannot be sent"),
    ],
)
def test_invalid_config_files_are_refused(tmp_path: Path, entry: object, reason: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(entry if isinstance(entry, str) else json.dumps({"mcpServers": entry}))
    with pytest.raises(ConfigError, match=reason):
        read_mcp_config(str(file), {})


@pytest.mark.parametrize("entry", ["", "host", "host:x", "file:///x", "a b:1", "http://u:p@h/"])
def test_invalid_tool_server_flags_are_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="--tool-server"):
        from_flag(entry)


def test_half_a_surrogate_pair_from_a_server_can_be_passed_on() -> None:
    [message] = decode(b'{"jsonrpc": "2.0", "id": 1, "result": {"\\ud800": "a\\udc00"}}')
    assert message["result"] == {"\ufffd": "a\ufffd"}
