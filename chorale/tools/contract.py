"""The contract between the tool loop and the tools: frozen values and three protocols.

A ``ToolService`` exists for the life of the HTTP process and opens a ``ToolBox`` for each response. State
that must survive the response (browser cursors, the id of a python session) is returned by
``ToolBox.state()`` and passed to ``ToolService.open(state=...)`` later. A call never raises because of a
failing tool: every failure becomes the text of a ``ToolResult`` with ``failed=True``, which the model reads.
Closing the generator of a call aborts the call.

Values with a tag are stored within the events of a turn (``chorale.turns.events``).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import msgspec

from chorale.harmony.messages import ToolNamespace

ToolKind = Literal["browser", "python", "mcp"]


# --------------------------------------------------------------------------- requested tools


@dataclass(frozen=True, slots=True)
class WebSearchRequest:
    """A ``{"type": "web_search", ...}`` tool, including its older type names."""

    allowed_domains: tuple[str, ...] = ()  # empty: all domains; a domain includes its subdomains
    context_size: Literal["low", "medium", "high"] = "medium"
    external_access: bool = True  # False: only cached or offline pages
    user_location: str | None = None  # "Paris, FR": a hint for back ends that support it


@dataclass(frozen=True, slots=True)
class CodeInterpreterRequest:
    """A ``{"type": "code_interpreter", ...}`` tool. ``container_id`` None: the session of the chain."""

    container_id: str | None = None
    memory_bytes: int | None = None  # lowers the operator's limit, never raises it


@dataclass(frozen=True, slots=True)
class McpRequest:
    """A ``{"type": "mcp", ...}`` tool. Without ``server_url``, the label names a configured server."""

    server_label: str
    server_url: str | None = None
    headers: Mapping[str, str] | None = None
    authorization: str | None = None  # OAuth access token, sent as "Authorization: Bearer ..."
    allowed_tools: frozenset[str] | None = None  # None: all of them
    read_only: bool | None = None  # allowed_tools.read_only: only tools with readOnlyHint
    # Whether all tools require approval, before the exceptions below.
    require_approval: bool = True
    never_approve: frozenset[str] = frozenset()  # names that never require approval
    always_approve: frozenset[str] = frozenset()  # names that always require approval
    description: str | None = None


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The built-in tools that one request enabled."""

    web_search: WebSearchRequest | None = None
    code_interpreter: CodeInterpreterRequest | None = None
    mcp: tuple[McpRequest, ...] = ()

    def __bool__(self) -> bool:
        return self.web_search is not None or self.code_interpreter is not None or bool(self.mcp)


# --------------------------------------------------------------------------- calls and results


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call by the model. ``content`` is unparsed: JSON arguments, or code for ``python``."""

    recipient: str  # "browser.search", "python", "deepwiki.ask_question"
    content: str
    call_id: str  # the API's item id, used for logs and progress tokens


class Source(msgspec.Struct, frozen=True, array_like=True, tag="source"):
    url: str
    title: str
    snippet: str = ""


class SearchAction(msgspec.Struct, frozen=True, array_like=True, tag="search"):
    query: str
    sources: tuple[Source, ...] = ()


class OpenPageAction(msgspec.Struct, frozen=True, array_like=True, tag="open_page"):
    url: str | None  # None: scrolling in a page without an address (search results)


class FindAction(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    pattern: str
    url: str | None


# Of a ``web_search_call``: its progress once it is known, and the detail of its result. Malformed arguments
# also give an action of the recipient's kind.
BrowserAction = SearchAction | OpenPageAction | FindAction


class CodeStarted(msgspec.Struct, frozen=True, array_like=True, tag="code_started"):
    container_id: str


class CodeOutput(msgspec.Struct, frozen=True, array_like=True, tag="code_output"):
    text: str  # the concatenated pieces of a call are ``PythonDetail.logs``


class McpProgress(msgspec.Struct, frozen=True, array_like=True, tag="mcp_progress"):
    """A ``notifications/progress`` message or log line of the server."""

    message: str
    progress: float | None = None
    total: float | None = None


Progress = BrowserAction | CodeStarted | CodeOutput | McpProgress


class PythonDetail(msgspec.Struct, frozen=True, array_like=True, tag="python"):
    """For ``code_interpreter_call``. ``logs``: stdout, stderr, the last expression, the traceback."""

    container_id: str
    code: str
    logs: str


class McpDetail(msgspec.Struct, frozen=True, array_like=True, tag="mcp"):
    """For ``mcp_call``: exactly one of ``output`` and ``error`` is None."""

    server_label: str
    name: str
    arguments: str
    output: str | None
    error: str | None


class ToolResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """The last value that a call yields. ``content``: the text for the model, never empty."""

    author: str  # the tool's full name, the author of the harmony message
    content: str
    failed: bool
    detail: BrowserAction | PythonDetail | McpDetail


def failed_result(identity: ToolIdentity, call: ToolCall, content: str, error: str) -> ToolResult:
    """Returns the result of a call whose tool gave none. ``error``: for the API's item."""
    detail: BrowserAction | PythonDetail | McpDetail
    if identity.kind == "browser":
        detail = SearchAction("")
    elif identity.kind == "python":
        detail = PythonDetail("", call.content, error)
    else:
        detail = McpDetail(identity.server_label, identity.name, call.content, None, error)
    return ToolResult(call.recipient, content, True, detail)


# --------------------------------------------------------------------------- citations


class UrlCitation(msgspec.Struct, frozen=True, array_like=True, tag="citation"):
    """A citation. Offsets count code points of the rewritten text; ``end_index`` is exclusive."""

    start_index: int
    end_index: int
    url: str
    title: str


@dataclass(frozen=True, slots=True)
class CitedText:
    """A piece of the rewritten text. A citation covers exactly its piece."""

    text: str
    citation: UrlCitation | None = None


class CitationStream(Protocol):
    """Rewrites one text part incrementally, with the same result however the input is split."""

    def feed(self, text: str) -> list[CitedText]:
        """Returns text that can be shown now. Holds back a possible beginning of a citation mark."""
        ...

    def finish(self) -> list[CitedText]:
        """Returns the text that was held back, unchanged."""
        ...


# --------------------------------------------------------------------------- the box and the service


@dataclass(frozen=True, slots=True)
class ToolIdentity:
    """The tool behind a recipient, known as soon as the header of a call is complete."""

    kind: ToolKind
    server_label: str  # "browser" or "python" for the built-in tools
    name: str  # "search", "python", "ask_question"
    needs_approval: bool = False


class McpToolInfo(msgspec.Struct, frozen=True, array_like=True, tag="mcp_tool"):
    name: str
    description: str | None
    input_schema: Mapping[str, Any]
    annotations: Mapping[str, Any] | None = None


class McpListing(msgspec.Struct, frozen=True, array_like=True, tag="listing"):
    """The tools of a server, for ``mcp_list_tools``: one per McpRequest, even if the server failed
    (``error``).
    """

    server_label: str
    tools: tuple[McpToolInfo, ...]
    error: str | None = None


class ToolBox(Protocol):
    """The tools of one response. For one task at a time; must always be closed."""

    @property
    def system_namespaces(self) -> tuple[ToolNamespace, ...]:
        """Returns the namespaces of the system message: ``browser`` and ``python``."""
        ...

    @property
    def developer_namespaces(self) -> tuple[ToolNamespace, ...]:
        """Returns the namespaces of the developer message, one per MCP server. No name is "functions"."""
        ...

    @property
    def recipients(self) -> frozenset[str]:
        """Returns all recipients that ``call`` accepts: "browser.search", "python", "label.tool"."""
        ...

    @property
    def listings(self) -> tuple[McpListing, ...]: ...

    @property
    def container_id(self) -> str | None:
        """Returns the id of the python session, or None without python."""
        ...

    def owns(self, recipient: str) -> bool:
        """Returns whether a recipient belongs to these tools.

        Also True for misspelled recipients ("browser.serach"), whose calls fail with a list of the tools.
        """
        ...

    def identify(self, recipient: str) -> ToolIdentity:
        """Returns the identity of a recipient that ``owns`` accepts. Raises ``KeyError`` for others."""
        ...

    def call(self, call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        """Yields progress, then one ``ToolResult``. ``aclose()`` of the generator aborts the call."""
        ...

    def citation_stream(self) -> CitationStream:
        """Returns a rewriter that knows the cursors of earlier and later calls."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns the state for the next response of the chain as JSON values, a few kB to 256 kB."""
        ...

    async def aclose(self) -> None: ...


class ToolService(Protocol):
    """The tools of one HTTP process. ``chorale.tools.service.start_tools`` makes one."""

    @property
    def available(self) -> Mapping[str, str]:
        """Returns a line for the banner per tool ("browser", "python", "mcp", a configured label)."""
        ...

    @property
    def missing(self) -> Mapping[str, str]:
        """Returns the reason and remedy per requested tool that cannot run."""
        ...

    async def open(
        self, request: RequestTools, *, session_key: str, state: Mapping[str, Any] | None = None
    ) -> ToolBox:
        """Opens the tools of one response and connects to its MCP servers, whose failures are in
        ``listings``. A browser or python that is not ``available`` is left out.

        ``session_key``: an unguessable key of the chain of responses, which identifies its python session.
        """
        ...

    async def aclose(self) -> None: ...


class SystemTool:
    """A browser or python tool, built-in or on an MCP server. ``container_id``: python's session."""

    namespace: ToolNamespace
    recipients: frozenset[str]
    container_id: str = ""

    def call(self, call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        raise NotImplementedError

    def cited(self, cursor: int, line: int | None) -> Link | None:
        """Returns what a citation mark refers to. Only a browser has pages that can be cited."""
        return None

    def state(self) -> Any:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Does nothing: the service owns the sessions, the fetchers and the cache of built-in tools."""


@dataclass(frozen=True, slots=True)
class Link:
    url: str
    title: str = ""
    loc: int | None = None  # line at which to open the page, for links of a find page


@dataclass(frozen=True, slots=True)
class BuiltInRequest:
    """The requested built-in tools.

    ``paths``: the request field that contains each tool, for errors; ``unserved``: tools of types that
    this server never runs.
    """

    wanted: RequestTools = field(default_factory=RequestTools)
    paths: tuple[tuple[str, str], ...] = ()  # (name for tool_choice, path)
    unserved: tuple[tuple[str, str], ...] = ()  # (type, path)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.paths]

    def without_web_search(self) -> BuiltInRequest:
        paths = tuple(entry for entry in self.paths if entry[0] != "web_search")
        return replace(self, wanted=replace(self.wanted, web_search=None), paths=paths)
