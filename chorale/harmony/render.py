"""Renders conversations to token ids.

The ids equal those of openai-harmony 0.0.8 (``auto_drop_analysis=False``), with three additions: messages
that the model wrote are replayed from their exact ids, a ``# Response Formats`` section can follow the tools,
and by default analysis is dropped up to the last answer (openai-harmony: up to the first). Only this module
places special tokens; all text from clients is encoded as ordinary text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from chorale.harmony.messages import (
    KNOWLEDGE_CUTOFF,
    DeveloperContent,
    Message,
    ResponseFormat,
    SystemContent,
    ToolNamespace,
)
from chorale.harmony.schema_ts import compact_json, schema_to_typescript
from chorale.harmony.vocab import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START, Vocabulary, check_count

ASSISTANT: Final = 173781  # the one token of "assistant"
FINAL: Final = 17196  # the one token of "final"

_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_FUNCTIONS_NOTE = "Calls to these tools must go to the commentary channel: 'functions'."


def render_conversation(
    messages: Sequence[Message],
    vocab: Vocabulary,
    *,
    for_completion: bool = True,
    drop_analysis: bool = True,
    most: int | None = None,
) -> list[int]:
    """Returns the ids of the conversation, ending in ``<|start|>assistant`` if ``for_completion``.

    ``drop_analysis``: only ``kept_messages`` are rendered. Raises ``ValueError`` for a message that has no
    wire form (see ``render_message``), and ``ContextLengthError`` for more than ``most`` ids, without
    computing many more.
    """
    has_functions = _has_functions(messages)
    ids: list[int] = []
    for message in kept_messages(messages) if drop_analysis else messages:
        ids += render_message(message, vocab, has_functions=has_functions, most=most)
        check_count(ids, most)
    if for_completion:
        ids += (START, ASSISTANT)
    return ids


def render_message(
    message: Message, vocab: Vocabulary, *, has_functions: bool = False, most: int | None = None
) -> list[int]:
    """Returns the ids of one message, from ``<|start|>`` to its terminator.

    ``has_functions``: the conversation declares function tools, which the system message then mentions.
    Raises ``ValueError`` if a tool message has no name or if structured content is in a message of another
    role, and ``ContextLengthError`` for content of more than ``most`` ids.
    """
    ids = [START, *vocab.encode(_author(message))]
    if message.token_ids is not None:
        ids += message.token_ids
    else:
        ids += _header(message, vocab)
        ids += vocab.encode(_content(message, has_functions), most)
    ids.append(CALL if message.role == "assistant" and message.recipient is not None else END)
    return ids


def kept_messages(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages without the reasoning before the last answer that is followed by a user message.

    Calls and their results stay, on any channel.
    """
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
    finals = [i for i, m in enumerate(messages[:last_user]) if _is_answer(m)]
    cut = finals[-1] if finals else 0
    return [m for i, m in enumerate(messages) if i >= cut or not _is_reasoning(m)]


def _is_answer(message: Message) -> bool:
    return message.role == "assistant" and message.channel == "final"


def _is_reasoning(message: Message) -> bool:
    return message.role == "assistant" and message.channel == "analysis" and message.recipient is None


def _has_functions(messages: Iterable[Message]) -> bool:
    return any(
        namespace.name == "functions" and namespace.tools
        for message in messages
        if isinstance(message.content, DeveloperContent)
        for namespace in message.content.namespaces
    )


# --------------------------------------------------------------------------- the header


def _author(message: Message) -> str:
    if message.role != "tool":
        return message.role if message.name is None else f"{message.role}:{message.name}"
    if message.name is None:
        raise ValueError("a tool message needs the name of its tool")
    return message.name


def _header(message: Message, vocab: Vocabulary) -> list[int]:
    """Returns the ids of recipient, channel, content type and ``<|message|>``, each encoded separately, as in
    training."""
    ids: list[int] = []
    if message.recipient is not None and message.recipient != "all":
        ids += vocab.encode(f" to={message.recipient}")
    if message.channel is not None:
        ids += [CHANNEL, *vocab.encode(message.channel)]
    if message.content_type is not None:
        kind = message.content_type.removeprefix("<|constrain|>")
        if kind != message.content_type:
            ids += [*vocab.encode(" "), CONSTRAIN, *vocab.encode(kind)]
        else:
            ids += vocab.encode(f" {kind}")
    ids.append(MESSAGE)
    return ids


# --------------------------------------------------------------------------- the content


def _content(message: Message, has_functions: bool) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    expected = "system" if isinstance(content, SystemContent) else "developer"
    if message.role != expected:
        raise ValueError(f"{type(content).__name__} is not allowed in a {message.role} message")
    if isinstance(content, SystemContent):
        return render_system(content, has_functions)
    return render_developer(content)


def render_system(content: SystemContent, has_functions: bool) -> str:
    """Returns the text of the system message."""
    top = [content.model_identity, f"Knowledge cutoff: {KNOWLEDGE_CUTOFF}"]
    if content.current_date is not None:
        top.append(f"Current date: {content.current_date}")
    sections = ["\n".join(top), f"Reasoning: {content.reasoning_effort}"]
    if content.namespaces:
        sections.append(_tools(content.namespaces))
    sections.append(f"{_CHANNELS}\n{_FUNCTIONS_NOTE}" if has_functions else _CHANNELS)
    return "\n\n".join(sections)


def render_developer(content: DeveloperContent) -> str:
    """Returns the text of the developer message."""
    sections = []
    if content.instructions is not None:
        sections += ["# Instructions", content.instructions]
    if content.namespaces:
        sections.append(_tools(content.namespaces))
    if content.response_formats:
        sections.append("# Response Formats")
        sections += [_response_format(entry) for entry in content.response_formats]
    return "\n\n".join(sections)


def _response_format(entry: ResponseFormat) -> str:
    lines = [f"// {line}" for line in _lines(entry.description or "")]
    return "\n".join([f"## {entry.name}\n", *lines, compact_json(entry.schema)])


def _tools(namespaces: Iterable[ToolNamespace]) -> str:
    """Returns the "# Tools" section, with namespaces sorted by name. Of equal names, the last counts."""
    by_name = {namespace.name: namespace for namespace in namespaces}
    return "\n\n".join(["# Tools", *(_namespace(by_name[name]) for name in sorted(by_name))])


def _namespace(namespace: ToolNamespace) -> str:
    lines = [f"## {namespace.name}\n"]
    prefix = "// " if namespace.tools else ""
    lines += [f"{prefix}{line}" for line in _lines(namespace.description or "")]
    if namespace.tools:
        lines.append(f"namespace {namespace.name} {{\n")
        for tool in namespace.tools:
            lines += [f"// {line}" for line in _lines(tool.description)]
            arguments = "" if tool.parameters is None else f"_: {schema_to_typescript(tool.parameters)}"
            lines.append(f"type {tool.name} = ({arguments}) => any;\n")
        lines.append(f"}} // namespace {namespace.name}")
    return "\n".join(lines)


def _lines(text: str) -> list[str]:
    """Returns lines without their ends, as Rust's ``str::lines``: a final newline adds no empty line."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    else:
        lines[-1] += "\r" if lines[-1].endswith("\r") else ""  # a bare "\r" at the end is not a line end
    return [line.removesuffix("\r") for line in lines]
