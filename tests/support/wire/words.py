"""Texts of the scripted model, and objects that the scenarios request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from chorale.errors import EngineDeadError
from tests.support.engine.scripted_client import Script
from tests.support.scripted import ANALYSIS, FINAL, NEXT, ids
from tests.support.server import Server

RETURN, CALL = "<|return|>", "<|call|>"
THINK = f"{ANALYSIS}Hm.{NEXT}"
HELLO = f"{THINK}{FINAL}Hi there!{RETURN}"
JSON = f'{THINK}{FINAL}{{"n":1}}{RETURN}'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
STREAMED = (False, True)
RESPONSES, CHAT, MESSAGES = "/v1/responses", "/v1/chat/completions", "/v1/messages"
CONVERSATIONS = "/v1/conversations"
CHAT_HI = [{"role": "user", "content": "hi"}]


def tool(recipient: str, text: str, channel: str = "analysis") -> str:
    return f"{THINK}<|channel|>{channel} to={recipient} code<|message|>{text}{CALL}"


SEARCH = tool("browser.search", '{"query":"q"}')
OPEN = tool("browser.open", '{"id":0}')
FIND = tool("browser.find", '{"pattern":"p"}')
CITED = f"{FINAL}It is so【0†L0-L0】.{RETURN}"
CODE = tool("python", "print(42)")
ECHO = tool("srv.echo", '{"text":"x"}', "commentary")
FAILED = tool("srv.echo", '{"text":"fail"}', "commentary")
BROKEN = Script(ids(f"{THINK}{FINAL}Half"), error=EngineDeadError("it died"))
MCP = {
    "type": "mcp",
    "server_label": "srv",
    "server_url": "https://example.com/mcp",
    "require_approval": "never",
}
SERVER_TOOLS = [{"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}}, MCP]
GET = {"type": "function", "name": "get", "description": "Gets.", "parameters": SCHEMA, "strict": False}
BARE = {"type": "function", "name": "ping"}

Scenario = Callable[[Server], Awaitable[None]]
