"""Seeded random conversations, and the same in openai-harmony's types."""

from __future__ import annotations

import random
from typing import Any

import openai_harmony as oh

from chorale.harmony.builtin_tools import browser_tools, python_tool
from chorale.harmony.messages import (
    KNOWLEDGE_CUTOFF,
    DeveloperContent,
    Message,
    SystemContent,
    ToolDescription,
    ToolNamespace,
)

WORDS = [
    "hello", "the", "a", " ", "\n", "\n\n", "  ", "\t",
    "naïve", "日本語", "мир", "😀", "👩‍👩‍👧", "123", "4567", "don't",
    "<|end|>", "<|start|>system", "<|channel|>", "{", "}", '"', "\\", "//",
    "é", "e\u0301", "\r\n", "\u3000", "ﷺ", "١٢",
    "function(x)", "null", " to=functions.f", "x_y-z", "…", "\u200b", "\U0001f1e9\U0001f1ea", ",", ".", "L9",
]  # fmt: skip
NAMES = ["city", "unit", "naïve", "日", "x_1", "longNameOfThing", "a-b", "null", "Type"]


def text(rng: random.Random, most: int = 12) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, most)))


def value(rng: random.Random, depth: int = 0) -> Any:
    kinds = ["str", "int", "float", "bool", "null"] + (["list", "dict"] if depth < 2 else [])
    match rng.choice(kinds):
        case "str":
            return text(rng, 3)
        case "int":
            return rng.choice([0, -1, 7, 10**12, rng.randint(-1000, 1000)])
        case "float":
            return rng.choice([0.5, -2.25, 1e20, 1.0, 3.25e-7, 2.5e-5, 1e15, 1e16, 0.0001])
        case "bool":
            return rng.random() < 0.5
        case "list":
            return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
        case "dict":
            return {rng.choice(NAMES): value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    return None


def schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema that a user could send, or one that is a little wrong."""
    if rng.random() < 0.03:
        return rng.choice([True, "string", 5, [], {}])
    out: dict[str, Any] = {}
    for key in ("title", "description"):
        if rng.random() < 0.25:
            out[key] = text(rng, 4) if rng.random() < 0.95 else 5
    if rng.random() < 0.2:
        out["default"] = value(rng)
    if rng.random() < 0.1:
        out["examples"] = [value(rng) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.1:
        out["nullable"] = rng.choice([True, False, "yes"])
    deeper = depth < 3
    kinds = ["string", "integer", "number", "boolean", "enum", "types", "null", "none", "const", "ref", "bad"]
    kinds += ["object", "object", "array", "oneOf", "anyOf"] if deeper else []
    match rng.choice(kinds) if depth else rng.choice(["object"] * 8 + kinds):
        case "enum":
            out |= {
                "type": rng.choice(["string", "string", "integer"]),
                "enum": [text(rng, 2), "b", 3][: rng.randint(0, 3)],
            }
        case "types":
            out["type"] = [
                rng.choice(["integer", "null", "string", "object", 5]) for _ in range(rng.randint(0, 3))
            ]
        case "none":
            if rng.random() < 0.5:
                out["enum"] = ["x", "y"]
        case "const":
            out["const"] = value(rng)
        case "ref":
            out["$ref"] = "#/$defs/x"
        case "bad":
            out["type"] = rng.choice([5, {}, "thing", ""])
        case "object":
            out["type"] = "object"
            _members(rng, out, depth)
        case "array":
            out["type"] = "array"
            if rng.random() < 0.8:
                out["items"] = schema(rng, depth + 1)
        case "oneOf" | "anyOf" as key:
            out[key] = (
                [schema(rng, depth + 1) for _ in range(rng.randint(0, 3))] if rng.random() < 0.95 else "x"
            )
            if rng.random() < 0.2:
                out["type"] = "string"
        case kind:
            out["type"] = kind
    items = list(out.items())
    rng.shuffle(items)
    return dict(items)


def _members(rng: random.Random, out: dict[str, Any], depth: int) -> None:
    if rng.random() < 0.9:
        out["properties"] = {rng.choice(NAMES): schema(rng, depth + 1) for _ in range(rng.randint(0, 4))}
        if rng.random() < 0.6:
            out["required"] = rng.sample(NAMES, 3) if rng.random() < 0.95 else ["city", 5]
    if rng.random() < 0.2:
        out |= {"additionalProperties": False, "minProperties": 1}


def namespace(rng: random.Random, name: str) -> ToolNamespace:
    tools = tuple(
        ToolDescription(
            f"f{i}_{rng.choice(NAMES)}", text(rng, 6), schema(rng) if rng.random() < 0.8 else None
        )
        for i in range(rng.randint(0, 3))
    )
    # The oracle accepts only objects as parameters.
    tools = tuple(
        ToolDescription(t.name, t.description, t.parameters if isinstance(t.parameters, dict) else None)
        for t in tools
    )
    return ToolNamespace(name, text(rng, 5) if rng.random() < 0.4 else None, tools)


def conversation(rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    if rng.random() < 0.8:
        messages.append(Message("system", _system(rng)))
    if rng.random() < 0.6:
        spaces = [namespace(rng, n) for n in ("functions", "alpha", "zeta") if rng.random() < 0.5]
        instructions = text(rng) if rng.random() < 0.7 else None
        messages.append(Message("developer", DeveloperContent(instructions, tuple(spaces))))
    messages += [_message(rng) for _ in range(rng.randint(0, 8))]
    return messages


def _system(rng: random.Random) -> SystemContent:
    spaces = []
    if rng.random() < 0.3:
        spaces.append(browser_tools())
    if rng.random() < 0.3:
        spaces.insert(0, python_tool(stateful=True))
    return SystemContent(
        model_identity=rng.choice(["You are ChatGPT.", text(rng)]),
        current_date=rng.choice([None, "2025-06-28"]),
        reasoning_effort=rng.choice(["low", "medium", "high"]),
        namespaces=tuple(spaces),
    )


def _message(rng: random.Random) -> Message:
    role = rng.choice(["user", "user", "assistant", "assistant", "assistant", "tool", "developer", "system"])
    recipient = rng.choice([None, None, "functions.f", "python", "all", "assistant", "browser.search"])
    name = rng.choice([None, "bob", "naïve"])
    return Message(
        role,  # type: ignore[arg-type]
        text(rng),
        name=rng.choice(["functions.f", "python"])
        if role == "tool"
        else name
        if rng.random() < 0.2
        else None,
        recipient=recipient if role in ("assistant", "tool") else None,
        channel=rng.choice([None, "analysis", "analysis", "commentary", "final", "final"]),
        content_type=rng.choice([None, None, "<|constrain|>json", "json", "code", "<|constrain|>"]),
    )


# --------------------------------------------------------------------------- to the oracle's types


def to_oracle(ours: list[Message]) -> oh.Conversation:
    return oh.Conversation.from_messages(list(map(_to_oracle_message, ours)))


def _to_oracle_message(ours: Message) -> oh.Message:
    content: Any = ours.content
    if isinstance(ours.content, SystemContent):
        content = oh.SystemContent(
            model_identity=ours.content.model_identity,
            knowledge_cutoff=KNOWLEDGE_CUTOFF,
            conversation_start_date=ours.content.current_date,
            reasoning_effort=oh.ReasoningEffort[ours.content.reasoning_effort.upper()],
            channel_config=oh.ChannelConfig.require_channels(["analysis", "commentary", "final"]),
            tools=_to_oracle_tools(ours.content.namespaces),
        )
    elif isinstance(ours.content, DeveloperContent):
        content = oh.DeveloperContent(
            instructions=ours.content.instructions, tools=_to_oracle_tools(ours.content.namespaces)
        )
    message = oh.Message.from_author_and_content(oh.Author(role=oh.Role(ours.role), name=ours.name), content)
    message.channel, message.recipient, message.content_type = ours.channel, ours.recipient, ours.content_type
    return message


def _to_oracle_tools(spaces: tuple[ToolNamespace, ...]) -> dict[str, oh.ToolNamespaceConfig] | None:
    return {
        space.name: oh.ToolNamespaceConfig(
            name=space.name,
            description=space.description,
            tools=[
                oh.ToolDescription(
                    name=tool.name,
                    description=tool.description,
                    parameters=None if tool.parameters is None else dict(tool.parameters),
                )
                for tool in space.tools
            ],
        )
        for space in spaces
    } or None
