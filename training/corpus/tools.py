"""Function calling: choose among 1 to 6 tools, fill the arguments, use the result; one or two calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chorale.harmony.messages import Message, ToolDescription
from training.corpus.base import Dialogue, Draw
from training.corpus.fields import Field, compact, field, fields, join, mention, schema_of, spell
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
    "I would like to {v} the {n}", "Go and {v} the {n}",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tool:
    verb: str
    noun: str
    description: ToolDescription
    fields: list[Field]
    request: str | None = None  # a natural sentence that already gives every value
    optional: frozenset[str] = frozenset()


# Well-known tools: (name, description, [(parameter, kind, description)], sentences)
KNOWN: tuple[tuple[tuple[str, ...], str, tuple[tuple[str, str, str], ...], tuple[str, ...]], ...] = (
    (("get_weather", "get_current_weather", "weather", "getWeather", "fetch_weather"), "Get the current weather in a given {0}",
     (("city|location|place|town", "place", "The {0} to look up"),),
     ("What is the weather in {0}?", "What's the weather like in {0}?", "How is the weather in {0} today?", "weather in {0}",
      "Tell me the weather in {0}.", "Is it raining in {0}?", "What is the weather like in {0} right now?", "How's the weather in {0}?")),
    (("get_time", "current_time", "get_local_time"), "Get the current time in a {0}",
     (("city|timezone|place|location", "place", "The {0}"),),
     ("What time is it in {0}?", "Tell me the time in {0}.", "time in {0}", "What's the time in {0}?", "Which time is it in {0} now?")),
    (("get_stock_price", "stock_price", "quote"), "Get the price of a stock",
     (("ticker|symbol|stock", "upper", "The {0}"),),
     ("What is the stock price of {0}?", "Price of {0}?", "How is {0} trading?", "Get me a quote for {0}.", "Stock price for {0}")),
    (("send_email", "send_message", "sendMail"), "Send a message to somebody",
     (("to|recipient", "place", "Who gets it"), ("text|message|body", "text", "What it says")),
     ("Send a message to {0} saying {1}", "Tell {0} that {1}", "Write to {0}: {1}", "Message {0}: {1}", "Send {0} the text {1}")),
    (("search", "web_search", "search_documents"), "Search for a {0}",
     (("query|q|term", "text", "What to search for"),),
     ("Search for {0}", "Look up {0}", "Find documents about {0}", "search {0}", "Please search for {0}")),
    (("set_alarm", "set_timer", "start_timer"), "Set a timer for some minutes",
     (("minutes|duration", "integer", "How many {0}"),),
     ("Set a timer for {0} minutes", "Wake me in {0} minutes", "Start a timer of {0} minutes", "timer {0} minutes")),
    (("book_table", "reserve_table"), "Book a table at a restaurant",
     (("restaurant|place|venue", "place", "The {0}"), ("guests|people|party_size", "integer", "How many people")),
     ("Book a table at {0} for {1} people", "Reserve a table for {1} at {0}", "Table for {1} at {0} please", "I want a table at {0} for {1}")),
    (("convert_currency", "exchange"), "Convert an amount between currencies",
     (("amount|value", "integer", "How much"), ("from_currency|source|base", "upper", "From"), ("to_currency|target", "upper", "To")),
     ("Convert {0} {1} to {2}", "How much is {0} {1} in {2}?", "Exchange {0} {1} into {2}", "{0} {1} in {2}?")),
    (("get_flight", "find_flights", "search_flights"), "Find flights between two cities",
     (("origin|from|departure", "place", "Where it starts"), ("destination|to|arrival", "place", "Where it goes")),
     ("Find flights from {0} to {1}", "I want to fly from {0} to {1}", "Flights from {0} to {1}?", "Show me flights to {1} from {0}")),
    (("calculate", "add_numbers", "add"), "Add two numbers",
     (("a|x|first", "integer", "First number"), ("b|y|second", "integer", "Second number")),
     ("Use the tool to add {0} and {1}", "Add {0} and {1} with the tool", "Call the calculator with {0} and {1}", "Use your tool: {0} plus {1}")),
)  # fmt: skip


def known_tool(draw: Draw) -> Tool:
    names, description, parameters, sentences = draw.pick(KNOWN)
    chosen, spoken = [], []
    for options, kind, about in parameters:
        name = draw.pick(options.split("|"))
        value: Any = draw.name() if kind == "place" else draw.word().upper()[:4]
        if kind == "integer":
            value = draw.integer(1, 300)
        elif kind == "text":
            value = " ".join(draw.words(draw.integer(1, 4)))
        schema: dict[str, Any] = {"type": "integer" if kind == "integer" else "string"}
        if draw.chance(0.5):
            schema["description"] = about.format(name)
        chosen.append(Field(name, name.replace("_", " "), schema, value, str(value)))
        spoken.append(str(value))
    name = draw.pick(names)
    tool = ToolDescription(name, description.format(chosen[0].spoken), schema_of(chosen))
    return Tool(name, name, tool, chosen, draw.phrase(sentences).format(*spoken))


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
        return tool.request, {one.name: one.value for one in tool.fields}
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


def toolbox(draw: Draw, size: int) -> list[Tool]:
    avoid: set[str] = set()
    tools: dict[str, Tool] = {}
    while len(tools) < size:
        tool = known_tool(draw) if draw.chance(0.3) else random_tool(draw, avoid)
        tools.setdefault(tool.description.name, tool)
    return list(tools.values())


# --------------------------------------------------------------------------- results


def result(draw: Draw) -> tuple[str, str, list[str]]:
    """(what the tool returned, the answer that uses it, the values that must appear)."""
    kind = draw.integer(0, 9)
    if kind < 6:
        chosen = [one for one in fields(draw, draw.integer(1, 3), described=0.0) if one.schema["type"] != "boolean"] or [
            field(draw, "integer")]  # fmt: skip
        values = {one.name: one.value for one in chosen}
        said = [f"the {one.name.replace('_', ' ')} is {plain(one.value)}" for one in chosen]
        text = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
        shown = compact(values) if draw.chance(0.5) else spaced(values)
        return shown, f"{text[0].upper()}{text[1:]}.", [plain(one.value) for one in chosen]
    if kind < 9:
        words = [draw.name().split()[0], *draw.words(draw.integer(1, 4)), str(draw.integer(0, 99))]
        draw.rng.shuffle(words)
        text = " ".join(words)
        return text, f"The result is: {text}", [text]
    return draw.pick(('{"ok":true}', '{"status":"ok"}', "ok", "done", "success")), "Done.", ["Done"]


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
    _think_call(dialogue, tool, values)
    if announce:
        dialogue.preamble(PREAMBLE.format(n=tool.description.name))
    dialogue.call(tool.description.name, compact(values))
    returned, text, needed = result(draw)
    dialogue.result(f"functions.{tool.description.name}", returned)
    _answer(dialogue, text)
    dialogue.answer = {"calls": [(tool.description.name, values)], "needed": needed}
    return dialogue


def _maybe_past_call(draw: Draw, dialogue: Dialogue, tools: list[Tool]) -> None:
    """Sometimes an earlier turn with a call stands in the history, as clients replay it."""
    if not draw.chance(0.15):
        return
    earlier = draw.pick(tools)
    request, values = ask(draw, earlier)
    returned, text, _ = result(draw)
    name = earlier.description.name
    kind = "<|constrain|>json" if draw.chance(0.5) else "json"
    dialogue.user(request)
    dialogue.history.append(
        Message(
            "assistant",
            compact(values),
            recipient=f"functions.{name}",
            channel="commentary",
            content_type=kind,
        )
    )
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
    tool = known_tool(draw)
    while len(tool.fields) != 1 or not isinstance(tool.fields[0].value, str):
        tool = known_tool(draw)
    tools = [
        tool,
        *(t for t in toolbox(draw, draw.integer(1, 3)) if t.description.name != tool.description.name),
    ]
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
