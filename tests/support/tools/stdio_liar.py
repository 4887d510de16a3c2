"""A stdio MCP server that misbehaves as its argument says."""

from __future__ import annotations

import json
import os
import sys
import time

KIND = sys.argv[1]


def say(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def tools() -> list[dict[str, object]]:
    plain = {"name": "echo", "inputSchema": {"type": "object", "properties": {"t": {"type": "string"}}}}
    if KIND == "many":
        return [{"name": f"tool{i}", "inputSchema": {"type": "object"}} for i in range(500)]
    if KIND == "wide":
        return [plain, {"name": "wide", "inputSchema": {"type": "object", "description": "x" * 100_000}}]
    if KIND == "odd":
        return [3, None, {}, {"name": 7}, {"name": ""}, {"name": "a b"}, {"name": "a.b"}, plain, plain]  # type: ignore[list-item]
    return [plain]


for line in sys.stdin:
    request = json.loads(line)
    number, method = request.get("id"), request.get("method")
    if KIND == "records":  # appends what it receives to the file of its second argument; answers no call
        with open(sys.argv[2], "a", encoding="utf-8") as file:
            file.write(line)
        if method == "tools/call":
            continue
    if number is None:
        continue
    if KIND == "silent":
        continue
    if KIND == "garbage":
        sys.stdout.write("hello, I am not JSON\n")
        sys.stdout.flush()
        continue
    if method == "initialize":
        if KIND == "asks":
            say({"jsonrpc": "2.0", "id": "q", "method": "sampling/createMessage", "params": {}})
        version = "1999-01-01" if KIND == "version" else request["params"]["protocolVersion"]
        result = {
            "protocolVersion": version,
            "capabilities": {},
            "serverInfo": {"name": "liar", "version": "0"},
        }
        say({"jsonrpc": "2.0", "id": number, "result": result})
    elif method == "tools/list":
        answer: dict[str, object] = {"tools": tools()}
        if KIND == "endless":
            answer["nextCursor"] = "again"
        say({"jsonrpc": "2.0", "id": number, "result": answer})
    elif KIND == "dies":
        sys.exit(3)
    elif KIND == "dies-once" and not os.path.exists(sys.argv[2]):  # makes the file of its second argument
        open(sys.argv[2], "x").close()
        sys.exit(3)
    elif KIND == "hangs":
        time.sleep(600)
    elif KIND == "floods":
        sys.stdout.write("x" * (16 * 2**20) + "\n")
        sys.stdout.flush()
    elif KIND == "wrong-id":
        say({"jsonrpc": "2.0", "id": 10**9, "result": {}})
        say({"jsonrpc": "2.0", "id": number, "result": {"content": [{"type": "text", "text": "right"}]}})
    elif KIND == "odd-id":
        for odd in ([], {}, None, "1", 1.5):
            say({"jsonrpc": "2.0", "id": odd, "result": {}})
        say({"jsonrpc": "2.0", "id": number, "result": {"content": [{"type": "text", "text": "right"}]}})
    elif KIND == "huge-progress":
        note = {"progressToken": "call_1", "progress": 10**400, "total": float("inf"), "message": "m"}
        say({"jsonrpc": "2.0", "method": "notifications/progress", "params": note})
        say({"jsonrpc": "2.0", "id": number, "result": {"content": []}})
    elif KIND == "no-result":
        say({"jsonrpc": "2.0", "id": number, "result": [1]})
    elif KIND == "chatter":
        for step in range(2000):
            note = {"progressToken": "call_1", "progress": step, "message": "m"}
            say({"jsonrpc": "2.0", "method": "notifications/progress", "params": note})
        say({"jsonrpc": "2.0", "id": number, "result": {"content": []}})
    else:
        content = [
            {"type": "text", "text": "one"},
            {"type": "image", "data": "AAAA", "mimeType": "image/png"},
            {"type": "resource", "resource": {"uri": "file:///x", "text": "two"}},
            {"type": "resource_link", "name": "n", "uri": "https://e.org/"},
            {"type": "strange"},
            7,
        ]
        say({"jsonrpc": "2.0", "id": number, "result": {"content": content, "isError": KIND == "error"}})
