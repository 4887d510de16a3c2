"""Function calling: choose among 1 to 6 tools, fill the arguments, use the result; one or two calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chorale.harmony.messages import Message, ToolDescription
from training.corpus.base import Dialogue, Draw
from training.corpus.fields import Field, compact, fields, join, marked, mention, schema_of, spell
from training.corpus.known import KNOWN, known_value
from training.corpus.structured import compact_value

VERBS = (
    "get", "find", "create", "book", "send", "delete", "list", "check", "open", "update", "search", "set", "add", "cancel",
    "show", "fetch", "start", "stop", "order", "read", "play", "lookup", "compute", "track", "reserve", "query",
)  # fmt: skip
DESCRIPTIONS = (
    "{V} the {n}", "{V} a {n}.", "{V}s the {n} for the user", "Use this to {v} a {n}.", "Lets you {v} the {n}.",
    "{V} {n} data.", "{V} the current {n}", "{V} the {n} of the given {p}.", "Call this to {v} {n}.",
)  # fmt: skip
REQUESTS = (
    "Please {v} the {n}", "{V} the {n}", "Can you {v} the {n}", "I want to {v} a {n}", "{V} a {n}", "I need the {n}",
    "Could you {v} a {n} for me", "Help me {v} the {n}", "Would you {v} the {n}", "{V} me the {n}", "Use the {n} tool",
    "Now {v} the {n}", "{v} {n}", "I have to {v} the {n}", "You should {v} the {n}", "Let us {v} the {n}", "{V} my {n}",
    "Could you please {v} the {n}", "Give me the {n}", "What is the {n}", "{V} the {n} now", "Please {v} a {n}",
    "Go and {v} the {n}", "Go {v} the {n}", "Go ahead and {v} the {n}", "Try and {v} the {n}", "I want you to {v} the {n}",
    "Be so kind and {v} the {n}", "I would like to {v} the {n}", "Can you please {v} the {n}", "Help me to {v} the {n}",
    "Would you please {v} the {n}", "Please go and {v} the {n}",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tool:
    verb: str
    noun: str
    description: ToolDescription
    fields: list[Field]
    request: str | None = None  # a natural sentence that already gives every value
    optional: frozenset[str] = frozenset()


# Well-known tools are in training.corpus.known; (names, descriptions, parameters, sentences)


def known_tool(draw: Draw, avoid: set[str]) -> Tool | None:
    """A tool that clients often have, unless one of its kind is in the box already."""
    kind = draw.pick(KNOWN)
    if kind.names[0] in avoid:
        return None
    avoid.add(kind.names[0])
    chosen, spoken = [], []
    for parameter in kind.parameters:
        name = draw.pick(parameter.names)
        value, shown = known_value(draw, parameter.kind)
        schema: dict[str, Any] = {"type": "integer" if parameter.kind == "integer" else "string"}
        if draw.chance(0.5):
            schema["description"] = draw.pick(parameter.about).format(name)
        chosen.append(Field(name, name.replace("_", " "), schema, value, shown))
        spoken.append(shown)
    request = str(draw.phrase(kind.sentences)).format(*spoken)
    required = [one.name for one in chosen]
    if kind.option is not None and draw.chance(0.5):
        name, options = kind.option
        value = draw.pick(options)
        schema = {"type": "string", "enum": list(options)}
        mentioned = draw.chance(0.4)
        chosen.append(Field(name, name, schema, value if mentioned else None, value))
        if mentioned:
            request = f"{request.rstrip('?.')} in {value}" + ("?" if request.endswith("?") else "")
    name = draw.pick(kind.names)
    about = draw.pick(kind.about).format(chosen[0].spoken)
    tool = ToolDescription(name, about, schema_of(chosen, required))
    return Tool(name, name, tool, chosen, request)


def random_tool(draw: Draw, avoid: set[str]) -> Tool:
    """A tool whose noun is a random word; some nouns are two words."""
    while True:
        noun = draw.words(2 if draw.chance(0.25) else 1)
        if not avoid & set(noun):
            break
    avoid |= set(noun)
    verb = draw.pick(VERBS)
    chosen = fields(draw, draw.pick((0, 1, 1, 1, 2, 2, 3, 4)))
    name = spell(draw, noun if draw.chance(0.15) else [verb, *noun])
    spoken = " ".join(noun)
    about = draw.phrase(DESCRIPTIONS).format(
        v=verb, V=verb.capitalize(), n=spoken, p=chosen[0].spoken if chosen else "user"
    )
    optional = frozenset(one.name for one in chosen[1:] if draw.chance(0.3))
    required = [one.name for one in chosen if one.name not in optional]
    parameters = (
        schema_of(chosen, required) if chosen else draw.pick((None, {"type": "object", "properties": {}}))
    )
    return Tool(verb, spoken, ToolDescription(name, about, parameters), chosen, None, optional)


def ask(draw: Draw, tool: Tool) -> tuple[str, dict[str, Any]]:
    """(the user's sentence, the arguments it implies)."""
    if tool.request is not None:
        return tool.request, {one.name: one.value for one in tool.fields if one.value is not None}
    given = [one for one in tool.fields if one.name not in tool.optional or draw.chance(0.5)]
    lead = draw.phrase(REQUESTS).format(v=tool.verb, V=tool.verb.capitalize(), n=tool.noun)
    values = {one.name: one.value for one in given}
    if not given:
        return lead + draw.pick((".", "", " please.", "?")), values
    told = list(given)
    if draw.chance(0.4):
        draw.rng.shuffle(told)
    if len(told) == 1 and isinstance(told[0].value, str) and draw.chance(0.45):
        return f"{lead} {draw.pick(('for', 'of', 'in', 'at', 'from', 'called'))} {told[0].shown}" + draw.pick(
            (".", "", "?")
        ), values
    clauses = join(draw, [mention(draw, one) for one in told])
    glue = draw.pick((" with ", ", ", ": ", ". ", " using "))
    return f"{lead}{glue}{clauses}" + draw.pick((".", "")), values


def toolbox(draw: Draw, size: int, avoid: set[str] | None = None) -> list[Tool]:
    """``size`` tools that cannot be taken for one another. ``avoid``: nouns and kinds that are taken."""
    avoid = set() if avoid is None else avoid
    tools: dict[str, Tool] = {}
    while len(tools) < size:
        tool = known_tool(draw, avoid) if draw.chance(0.3) else random_tool(draw, avoid)
        if tool is not None:
            tools.setdefault(tool.description.name, tool)
    return list(tools.values())


# --------------------------------------------------------------------------- results


def result(draw: Draw) -> tuple[str, str, list[str]]:
    """(what the tool returned, the answer that uses it, the values that must appear)."""
    kind = draw.integer(0, 9)
    if kind < 6:
        chosen = fields(draw, draw.integer(1, 3), described=0.0, result=True)
        values = {one.name: one.value for one in chosen}
        said = [f"the {one.name.replace('_', ' ')} is {plain(one.value)}" for one in chosen]
        text = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
        shown = compact(values) if draw.chance(0.4) else spaced(values)
        return shown, f"{text[0].upper()}{text[1:]}.", [plain(one.value) for one in chosen]
    if kind < 9:
        words = [draw.name().split()[0], *draw.words(draw.integer(0, 4)), str(draw.integer(0, 99))]
        draw.rng.shuffle(words)
        text = " ".join(words) if draw.chance(0.6) else ", ".join(words)
        text = marked(draw) if draw.chance(0.25) else text
        return text, f"The result is: {text}", [text]
    return (
        draw.pick(
            (
                '{"ok":true}',
                '{"status":"ok"}',
                '{"status": "ok"}',
                '{"success": true}',
                "ok",
                "done",
                "success",
            )
        ),
        "Done.",
        ["Done"],
    )


def plain(value: Any) -> str:
    return value if isinstance(value, str) else compact_value(value)


def spaced(values: dict[str, Any]) -> str:
    import json

    return json.dumps(values, ensure_ascii=False)


# --------------------------------------------------------------------------- dialogues


def _start(draw: Draw, tools: list[Tool], family: str) -> Dialogue:
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family=family)
    dialogue.functions = tuple(tool.description for tool in tools)
    return dialogue


def _think_call(dialogue: Dialogue, tool: Tool, values: dict[str, Any]) -> None:
    name = tool.description.name
    if dialogue.effort == "low":
        dialogue.think(f"Use {name}.")
    elif dialogue.effort == "medium":
        dialogue.think(f"The user wants the {tool.noun}, so I call {name}.")
    else:
        given = ", ".join(f"{key} {plain(value)}" for key, value in values.items()) or "nothing"
        others = len(dialogue.functions)
        dialogue.think(
            f"There {'is 1 tool' if others == 1 else f'are {others} tools'}. The user wants the {tool.noun}, which is {name}. "
            f"The arguments are {given}. I call {name}."
        )


def _answer(dialogue: Dialogue, text: str) -> None:
    if dialogue.effort == "medium":
        dialogue.think("I have the result.")
    elif dialogue.effort == "high":
        dialogue.think("The tool has answered. I tell the user what it said.")
    dialogue.say(text)


PREAMBLE = "I will call {n} now."
PREAMBLE_ASKS = (
    "Before each tool call, say what you are about to do.", "Say what you are about to do before calling a tool.",
    "Always announce your tool calls.", "Tell the user which tool you will call first.",
)  # fmt: skip


def one_call(draw: Draw) -> Dialogue:
    tools = toolbox(draw, draw.integer(1, 6))
    tool = draw.pick(tools)
    dialogue = _start(draw, tools, "call")
    announce = draw.chance(0.2)
    if announce:
        dialogue.instructions = draw.pick(PREAMBLE_ASKS)
    elif draw.chance(0.3):
        dialogue.instructions = draw.pick(
            ("You are a helpful assistant.", "Use the tools.", "Be brief.", "You help the user.")
        )
    _maybe_past_call(draw, dialogue, tools)
    request, values = ask(draw, tool)
    dialogue.user(request)
    if draw.chance(0.3) and not announce:
        return _replayed(draw, dialogue, tool, values)
    _think_call(dialogue, tool, values)
    if announce:
        dialogue.preamble(PREAMBLE.format(n=tool.description.name))
    dialogue.call(tool.description.name, compact(values))
    returned, text, needed = result(draw)
    dialogue.result(f"functions.{tool.description.name}", returned)
    _answer(dialogue, text)
    dialogue.answer = {"calls": [(tool.description.name, values)], "needed": needed}
    return dialogue


def _replayed(draw: Draw, dialogue: Dialogue, tool: Tool, values: dict[str, Any]) -> Dialogue:
    """The call and its result come from the client, as Chat replays them: without the analysis."""
    name = tool.description.name
    _replay_call(draw, dialogue, name, values)
    returned, text, needed = result(draw)
    dialogue.history.append(
        Message("tool", returned, name=f"functions.{name}", recipient="assistant", channel="commentary")
    )
    _answer(dialogue, text)
    dialogue.answer = {"calls": [], "needed": needed}
    return dialogue


def _replay_call(draw: Draw, dialogue: Dialogue, name: str, values: dict[str, Any]) -> None:
    shown = compact(values) if draw.chance(0.7) else spaced(values)
    kind = "<|constrain|>json" if draw.chance(0.8) else "json"
    dialogue.history.append(
        Message("assistant", shown, recipient=f"functions.{name}", channel="commentary", content_type=kind)
    )


def _maybe_past_call(draw: Draw, dialogue: Dialogue, tools: list[Tool]) -> None:
    """Sometimes an earlier turn with a call stands in the history, as clients replay it."""
    if not draw.chance(0.15):
        return
    earlier = draw.pick(tools)
    request, values = ask(draw, earlier)
    returned, text, _ = result(draw)
    name = earlier.description.name
    dialogue.user(request)
    _replay_call(draw, dialogue, name, values)
    dialogue.history.append(
        Message("tool", returned, name=f"functions.{name}", recipient="assistant", channel="commentary")
    )
    dialogue.past_answer(text)


def two_calls(draw: Draw) -> Dialogue:
    """The user asks for two things; the calls come one after the other."""
    tools = toolbox(draw, draw.integer(2, 5))
    first, second = draw.rng.sample(tools, 2)
    dialogue = _start(draw, tools, "two_calls")
    (ask1, values1), (ask2, values2) = ask(draw, first), ask(draw, second)
    glue = draw.pick((" Then ", " And also ", " After that, ", " Also: "))
    dialogue.user(f"{ask1.rstrip('.?')}.{glue}{ask2[0].lower()}{ask2[1:]}")
    texts, needed = [], []
    for tool, values in ((first, values1), (second, values2)):
        _think_call(dialogue, tool, values)
        dialogue.call(tool.description.name, compact(values))
        returned, text, must = result(draw)
        dialogue.result(f"functions.{tool.description.name}", returned)
        texts.append(text)
        needed += must
    _answer(dialogue, " ".join(texts))
    dialogue.answer = {
        "calls": [(first.description.name, values1), (second.description.name, values2)],
        "needed": needed,
    }
    return dialogue


def same_tool_twice(draw: Draw) -> Dialogue:
    """ "The weather in A and in B": one tool, two values."""
    tool = None
    while tool is None or len(tool.fields) != 1 or not isinstance(tool.fields[0].value, str):
        avoid: set[str] = set()
        tool = known_tool(draw, avoid)
    others = toolbox(draw, draw.integer(0, 2), avoid)
    tools = [tool, *(one for one in others if one.description.name != tool.description.name)]
    draw.rng.shuffle(tools)
    one = tool.fields[0]
    other = draw.name() if one.value[:1].isupper() and not one.value.isupper() else draw.word()
    other = other.upper()[:4] if one.value.isupper() else other
    assert tool.request is not None
    dialogue = _start(draw, tools, "two_calls")
    dialogue.user(tool.request.replace(str(one.value), f"{one.value} and {other}", 1))
    texts, needed, calls = [], [], []
    for value in (one.value, other):
        _think_call(dialogue, tool, {one.name: value})
        dialogue.call(tool.description.name, compact({one.name: value}))
        returned, text, must = result(draw)
        dialogue.result(f"functions.{tool.description.name}", returned)
        texts.append(text)
        needed += must
        calls.append((tool.description.name, {one.name: value}))
    _answer(dialogue, " ".join(texts))
    dialogue.answer = {"calls": calls, "needed": needed}
    return dialogue
