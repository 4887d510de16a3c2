"""What the tool loop of the API sees: frozen values and three protocols. No tool is implemented here.

A ``ToolService`` lives as long as the HTTP process. It opens one ``ToolBox`` for each response; what must
outlive the response (browser cursors, the id of a python session) leaves as ``ToolBox.state()`` and comes
back through ``ToolService.open(state=...)``. A call never raises for a tool's fault: whatever goes wrong
becomes the text of a ``ToolResult`` with ``failed=True``, which the model reads. Closing the generator of a
call aborts it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from chorale.harmony.messages import ToolNamespace

ToolKind = Literal["browser", "python", "mcp"]


# --------------------------------------------------------------------------- what a request asks for


@dataclass(frozen=True, slots=True)
class WebSearchRequest:
    """``{"type": "web_search", ...}`` and its older names."""

    allowed_domains: tuple[str, ...] = ()  # empty: any; a domain covers its subdomains
    context_size: Literal["low", "medium", "high"] = "medium"
    external_access: bool = True  # False: only pages that are cached or offline
    user_location: str | None = None  # "Paris, FR": a hint for back ends that take one


@dataclass(frozen=True, slots=True)
class CodeInterpreterRequest:
    """``{"type": "code_interpreter", "container": ...}``. ``container_id`` None: the chain's own session."""

    container_id: str | None = None
    memory_bytes: int | None = None  # lowers the operator's limit, never raises it


@dataclass(frozen=True, slots=True)
class McpRequest:
    """``{"type": "mcp", ...}``. Without ``server_url`` the label names one of the operator's servers."""

    server_label: str
    server_url: str | None = None
    headers: Mapping[str, str] | None = None
    authorization: str | None = None  # OAuth access token, sent as "Authorization: Bearer ..."
    allowed_tools: frozenset[str] | None = None  # None: all of them
    read_only: bool | None = None  # allowed_tools.read_only: only tools that say readOnlyHint
    # Names that need no approval; True: all need it; False: none does.
    require_approval: bool = True
    never_approve: frozenset[str] = frozenset()  # names that run without approval although require_approval
    always_approve: frozenset[str] = frozenset()  # names that need approval although not require_approval
    description: str | None = None


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The built-in tools that one request enabled."""

    web_search: WebSearchRequest | None = None
    code_interpreter: CodeInterpreterRequest | None = None
    mcp: tuple[McpRequest, ...] = ()

    def __bool__(self) -> bool:
        return self.web_search is not None or self.code_interpreter is not None or bool(self.mcp)


# --------------------------------------------------------------------------- a call and what comes of it


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model wrote. ``content`` is raw: JSON arguments, or the code itself for ``python``."""

    recipient: str  # "browser.search", "python", "deepwiki.ask_question"
    content: str
    call_id: str  # the API's item id; ours only for logs and for progress tokens


@dataclass(frozen=True, slots=True)
class SearchStarted:
    query: str


@dataclass(frozen=True, slots=True)
class PageOpening:
    url: str | None  # None: a scroll in a page without address (search results)


@dataclass(frozen=True, slots=True)
class FindStarted:
    pattern: str
    url: str | None


@dataclass(frozen=True, slots=True)
class CodeStarted:
    container_id: str


@dataclass(frozen=True, slots=True)
class CodeOutput:
    text: str  # in order; the pieces of a call, joined, are ``PythonDetail.logs``


@dataclass(frozen=True, slots=True)
class McpProgress:
    """``notifications/progress`` or a log line of the server."""

    message: str
    progress: float | None = None
    total: float | None = None


Progress = SearchStarted | PageOpening | FindStarted | CodeStarted | CodeOutput | McpProgress


@dataclass(frozen=True, slots=True)
class Source:
    url: str
    title: str
    snippet: str = ""


@dataclass(frozen=True, slots=True)
class SearchAction:
    query: str
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenPageAction:
    url: str | None


@dataclass(frozen=True, slots=True)
class FindAction:
    pattern: str
    url: str | None


@dataclass(frozen=True, slots=True)
class BrowserDetail:
    """For ``web_search_call``. Malformed arguments still give an action, of the recipient's kind."""

    action: SearchAction | OpenPageAction | FindAction


@dataclass(frozen=True, slots=True)
class PythonDetail:
    """For ``code_interpreter_call``. ``logs``: stdout, stderr, the last expression, the traceback."""

    container_id: str
    code: str
    logs: str


@dataclass(frozen=True, slots=True)
class McpDetail:
    """For ``mcp_call``: exactly one of ``output`` and ``error`` is None."""

    server_label: str
    name: str
    arguments: str
    output: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The last thing a call yields. ``content`` is what the model reads, never empty."""

    author: str  # the tool's full name: author of the harmony message
    content: str
    failed: bool
    detail: BrowserDetail | PythonDetail | McpDetail


# --------------------------------------------------------------------------- citations


@dataclass(frozen=True, slots=True)
class UrlCitation:
    """Offsets are code points of the rewritten text; ``end_index`` is exclusive."""

    start_index: int
    end_index: int
    url: str
    title: str


@dataclass(frozen=True, slots=True)
class CitedText:
    """A piece of the rewritten text; with a citation, the citation covers exactly this piece."""

    text: str
    citation: UrlCitation | None = None


class CitationStream(Protocol):
    """One text part, piece by piece. The pieces joined are the same however the input was cut."""

    def feed(self, text: str) -> list[CitedText]:
        """What may be shown now. A trailing part of a possible citation mark is held back."""
        ...

    def finish(self) -> list[CitedText]:
        """What was held back, as it stands."""
        ...


# --------------------------------------------------------------------------- the box and the service


@dataclass(frozen=True, slots=True)
class ToolIdentity:
    """What a recipient is, known as soon as the header of the call is."""

    kind: ToolKind
    server_label: str  # "browser" and "python" for the built-in ones
    name: str  # "search", "python", "ask_question"
    needs_approval: bool = False


@dataclass(frozen=True, slots=True)
class McpToolInfo:
    name: str
    description: str | None
    input_schema: Mapping[str, Any]
    annotations: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class McpListing:
    """For ``mcp_list_tools``: one for each McpRequest, also when the server failed (``error``)."""

    server_label: str
    tools: tuple[McpToolInfo, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A tool that the request enabled and this server does not have. The API refuses or drops it."""

    kind: ToolKind
    label: str
    reason: str


class ToolBox(Protocol):
    """The tools of one response. Used by one task at a time; close it on every path."""

    @property
    def system_namespaces(self) -> tuple[ToolNamespace, ...]:
        """For the system message: ``browser`` and ``python``."""
        ...

    @property
    def developer_namespaces(self) -> tuple[ToolNamespace, ...]:
        """For the developer message, one a server: MCP tools. Never named "functions"."""
        ...

    @property
    def recipients(self) -> frozenset[str]:
        """Every recipient that ``call`` takes: "browser.search", "python", "label.tool"."""
        ...

    @property
    def listings(self) -> tuple[McpListing, ...]: ...

    @property
    def unavailable(self) -> tuple[Unavailable, ...]: ...

    @property
    def container_id(self) -> str | None:
        """Of the python session, known from the start; None without python."""
        ...

    def owns(self, recipient: str) -> bool:
        """Whether a call to it is run here. Also true of slips ("browser.serach"): the call then
        fails with a text that tells the model what there is."""
        ...

    def identify(self, recipient: str) -> ToolIdentity:
        """For a recipient that ``owns`` accepts. Raises ``KeyError`` otherwise."""
        ...

    def call(self, call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        """Progress, then one ``ToolResult``. ``aclose()`` of the generator aborts the call."""
        ...

    def citation_stream(self) -> CitationStream:
        """A rewriter that knows the cursors of this moment and of later calls alike."""
        ...

    def state(self) -> dict[str, Any]:
        """What the next response of the chain needs, as plain JSON values, a few kB to 256 kB."""
        ...

    async def aclose(self) -> None: ...


class ToolService(Protocol):
    """The tools of one HTTP process. ``chorale.tools.service.start_tools`` makes one."""

    @property
    def available(self) -> Mapping[str, str]:
        """Tool ("browser", "python", "mcp", an operator's label) to one line for the banner."""
        ...

    @property
    def missing(self) -> Mapping[str, str]:
        """Tool that was asked for but cannot run, to the reason and its remedy."""
        ...

    async def open(
        self, request: RequestTools, *, session_key: str, state: Mapping[str, Any] | None = None
    ) -> ToolBox:
        """``session_key``: unguessable, one for a chain of responses (a python session belongs to it).
        Reaches the MCP servers of the request; their failures are in ``listings``, never raised."""
        ...

    async def aclose(self) -> None: ...


def cite(stream: CitationStream, text: str) -> tuple[str, tuple[UrlCitation, ...]]:
    """A whole text at once, through a fresh stream."""
    pieces = stream.feed(text) + stream.finish()
    return "".join(p.text for p in pieces), tuple(p.citation for p in pieces if p.citation is not None)
