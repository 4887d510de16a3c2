"""Function calling: choose among 1 to 6 tools, fill the arguments, use the result; one or two calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chorale.harmony.messages import Message, ToolDescription
from training.corpus.base import Dialogue, Draw
from training.corpus.fields import Field, compact, fields, join, mention, schema_of, spell
from training.corpus.known import KNOWN, known_request, known_value
from training.corpus.slots import ABOUT, NAMED, NOUNS, request, slots
from training.corpus.slots import VERBS as SLOT_VERBS
from training.corpus.structured import compact_value
from training.corpus.tool_phrases import ABOUT_ONE, DESCRIPTIONS, NEEDS, ORDERS, VERBS
from training.corpus.values import marked
from training.corpus.wishes import aside, wish


@dataclass(frozen=True, slots=True)
class Tool:
    verb: str
    noun: str
    description: ToolDescription
    fields: list[Field]
    request: str | None = None  # a natural sentence that states every value
    optional: frozenset[str] = frozenset()


_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def known_tool(draw: Draw, avoid: set[str]) -> Tool | None:
    """Returns a common tool, or None if the box already contains one of its kind."""
    kind = draw.pick(KNOWN)
    if kind.group in avoid or not (kind.orders.of(draw.split) or kind.questions.of(draw.split)):
        return None
    avoid.add(kind.group)
    chosen, spoken = [], []
    for parameter in kind.parameters:
        name = draw.pick(parameter.names)
        value, shown = known_value(draw, parameter.kind)
        schema: dict[str, Any] = {"type": "number" if parameter.kind == "amount" else _TYPES[type(value)]}
        if draw.chance(0.5):
            schema["description"] = draw.pick(parameter.about).format(name)
        chosen.append(Field(name, name.replace("_", " "), schema, value, shown))
        spoken.append(shown)
    request = known_request(draw, kind, spoken)
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
    """Returns a tool with a random noun, which may be two words."""
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


def slot_tool(draw: Draw, avoid: set[str]) -> Tool | None:
    """Returns a tool whose parameters can be stated in a sentence without their names."""
    noun = draw.pick(NOUNS) if draw.chance(0.5) else " ".join(draw.words(draw.pick((1, 1, 2))))
    if avoid & set(noun.split()) or avoid & {word.rstrip("s") for word in noun.split()}:
        return None
    avoid |= set(noun.split()) | {word.rstrip("s") for word in noun.split()}
    verb = draw.pick(SLOT_VERBS)
    filled = slots(draw)
    wanted, is_order = request(draw, verb, noun, filled)
    if is_order:
        wanted = wish(draw, wanted) + draw.pick((".", "", ""))
    written = verb if " " not in verb else NAMED[verb]
    name = spell(draw, noun.split() if draw.chance(0.12) else [written, *noun.split()])
    about = draw.phrase(ABOUT).format(v=written, V=written.capitalize(), n=noun, N=noun.capitalize())
    if draw.chance(0.2):
        about += draw.pick(
            (
                " Returns JSON.",
                " Requires the first parameter.",
                " Do not call it twice.",
                " The result is a short text.",
            )
        )
    chosen = [
        Field(one.name, one.name, one.schema, one.value if one.phrase is not None else None, str(one.value))
        for one in filled
    ]
    required = [one.name for one in filled if one.phrase is not None and draw.chance(0.7)]
    schema = schema_of(chosen, required)
    if draw.chance(0.3):
        schema["additionalProperties"] = False
    if draw.chance(0.25):
        draw.rng.shuffle(chosen)
        schema["properties"] = {one.name: one.schema for one in chosen}
    return Tool(verb, noun, ToolDescription(name, about, schema), chosen, wanted)


def ask(draw: Draw, tool: Tool) -> tuple[str, dict[str, Any]]:
    """Returns (the user's sentence, the arguments that it implies)."""
    request, values = _ask(draw, tool)
    return aside(draw) + request, values


def _ask(draw: Draw, tool: Tool) -> tuple[str, dict[str, Any]]:
    if tool.request is not None:
        return tool.request, {one.name: one.value for one in tool.fields if one.value is not None}
    given = [one for one in tool.fields if one.name not in tool.optional or draw.chance(0.5)]
    values = {one.name: one.value for one in given}
    if len(given) == 1 and isinstance(given[0].value, str) and ABOUT_ONE.of(draw.split) and draw.chance(0.3):
        shown = given[0].shown
        sentence = draw.phrase(ABOUT_ONE).format(n=tool.noun, x=shown, X=shown)
        return (sentence if sentence.startswith(shown) else sentence[0].upper() + sentence[1:]), values
    lead = _lead(draw, tool)
    if not given:
        return lead + draw.pick((".", "", " please.", "?")), values
    told = list(given)
    if draw.chance(0.4):
        draw.rng.shuffle(told)
    if len(told) == 1 and isinstance(told[0].value, str) and draw.chance(0.45):
        link = draw.pick(("for", "of", "in", "at", "from", "called", "named", "about", "to", "with", "on"))
        return f"{lead} {link} {told[0].shown}" + draw.pick((".", "", "?")), values
    clauses = join(draw, [mention(draw, one) for one in told])
    glue = draw.pick((" with ", ", ", ": ", ". ", " using ", " where ", "; ", " - "))
    return f"{lead}{glue}{clauses}" + draw.pick((".", "")), values


def _lead(draw: Draw, tool: Tool) -> str:
    """Returns the request without its values: "Please book the table"."""
    if not NEEDS.of(draw.split) or draw.chance(0.75):
        return wish(draw, draw.phrase(ORDERS).format(v=tool.verb, n=tool.noun))
    lead = draw.phrase(NEEDS).format(n=tool.noun)
    return f"{lead[0].upper()}{lead[1:]}" if draw.chance(0.8) else lead


def toolbox(
    draw: Draw, size: int, avoid: set[str] | None = None, known: float = 0.3, natural: float = 0.0
) -> list[Tool]:
    """Returns ``size`` tools that are not easily confused.

    ``avoid``: nouns and groups in use. ``known``: share of common tools; if 0, tools that might answer a plain
    question are left out, too. ``natural``: share of tools whose parameters can be stated without names (at
    least a third in training).
    """
    avoid = set() if avoid is None else avoid
    tools: dict[str, Tool] = {}
    natural = max(natural, 0.35) if draw.split == "train" and known else natural
    while len(tools) < size:
        if natural and draw.chance(natural):
            tool = slot_tool(draw, avoid)
        else:
            tool = known_tool(draw, avoid) if draw.chance(known) else random_tool(draw, avoid)
        if tool is not None:
            tools.setdefault(tool.description.name, tool)
    return list(tools.values())


# --------------------------------------------------------------------------- results


def result(draw: Draw) -> tuple[str, str, list[str]]:
    """Returns (the tool's result, the answer that uses it, the values that must appear)."""
    if draw.split == "train" and draw.chance(0.15):
        return _other_result(draw)
    kind = draw.integer(0, 9)
    if kind < 6:
        most = draw.pick((3, 3, 5)) if draw.split == "train" else 3
        chosen = fields(draw, draw.integer(1, most), described=0.0, result=True)
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


def _other_result(draw: Draw) -> tuple[str, str, list[str]]:
    """Returns results in other forms: a nested object, a list, a boolean, an error."""
    shown = compact if draw.chance(0.4) else spaced
    which = draw.integer(0, 3)
    if which == 0:
        chosen = fields(draw, draw.integer(1, 3), described=0.0, result=True)
        said = [f"the {one.name.replace('_', ' ')} is {plain(one.value)}" for one in chosen]
        text = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
        inside = {one.name: one.value for one in chosen}
        outer = draw.pick(("result", "data", "current", "main", "response", draw.word()))
        return shown({outer: inside}), f"{text[0].upper()}{text[1:]}.", [plain(one.value) for one in chosen]
    if which == 1:
        items = [draw.name() if draw.chance(0.5) else draw.word() for _ in range(draw.integer(1, 5))]
        key = draw.pick(("results", "items", draw.word()))
        returned = shown({key: items}) if draw.chance(0.5) else spaced(items)  # type: ignore[arg-type]
        return returned, f"The result is: {', '.join(items)}", items
    if which == 2:
        name, value = draw.word(), draw.chance(0.5)
        return shown({name: value}), f"The {name} is {plain(value)}.", [plain(value)]
    problem = " ".join(draw.words(draw.integer(1, 4))) if draw.chance(0.7) else "not found"
    returned = draw.pick((shown({"error": problem}), f"Error: {problem}", f"error: {problem}"))
    return returned, f"The tool reports an error: {problem}", [problem]


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
    return _one_call(draw, toolbox(draw, draw.integer(1, 6)), "call")


def natural_call(draw: Draw) -> Dialogue:
    """A call with the tools and sentences of ``slots``."""
    return _one_call(draw, toolbox(draw, draw.integer(1, 6), natural=0.85), "natural")


def _one_call(draw: Draw, tools: list[Tool], family: str) -> Dialogue:
    tool = draw.pick(tools)
    dialogue = _start(draw, tools, family)
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
    dialogue.answer["unseen_names"] = tool.request is None
    return dialogue


def _replayed(draw: Draw, dialogue: Dialogue, tool: Tool, values: dict[str, Any]) -> Dialogue:
    """The client replays the call and its result without the analysis, as in Chat."""
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
    """Sometimes adds an earlier turn with a call to the history, as clients replay it."""
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


_GLUES = (
    ". Then ", ". And also ", ". After that, ", ". Also: ", ". Also, ", ", then ", " and then ", "; then ", ". Next, ", ". Afterwards ",
    ", and after that ", ". As a second thing, ", ". Second: ", "? And ", ". And ", ", and also ",
)  # fmt: skip


def _both(draw: Draw, first: str, second: str, values: dict[str, Any]) -> str:
    """Joins two requests in one message; a value at the start of the second keeps its capital."""
    opens = any(second.startswith(str(value)) for value in values.values())
    second = second if opens else second[0].lower() + second[1:]
    return f"{first.rstrip('.?')}{draw.pick(_GLUES)}{second}"


def two_calls(draw: Draw) -> Dialogue:
    """The user asks for two things; the model calls the tools one after the other."""
    if draw.split == "train" and draw.chance(0.2):
        return shared_value(draw)
    tools = toolbox(draw, draw.integer(2, 5))
    first, second = draw.rng.sample(tools, 2)
    dialogue = _start(draw, tools, "two_calls")
    (ask1, values1), (ask2, values2) = ask(draw, first), ask(draw, second)
    dialogue.user(_both(draw, ask1, ask2, values2))
    pairs = [(first, values1), (second, values2)]
    if draw.split == "train" and draw.chance(0.45):
        return _replayed_two(draw, dialogue, pairs)
    return _one_after_the_other(draw, dialogue, pairs)


def shared_value(draw: Draw) -> Dialogue:
    """ "The weather and the time in A": two tools, one value for both."""
    tools, avoid = [], set[str]()
    value = draw.name()
    while len(tools) < 2:
        noun = draw.pick(("weather", "time", draw.pick(NOUNS), draw.word()))
        if noun in avoid:
            continue
        avoid.add(noun)
        verb = draw.pick(("get", "get", "find", "check", "show", "fetch", "lookup"))
        name = draw.pick(("city", "location", "place", "name", "town", "area", "region", draw.word()))
        schema: dict[str, Any] = {"type": "string"}
        if draw.chance(0.5):
            schema["description"] = draw.pick(
                ("The {0}", "Name of the {0}", "Which {0}", "City name")
            ).format(name)
        one = Field(name, name, schema, value, value)
        about = draw.phrase(ABOUT).format(v=verb, V=verb.capitalize(), n=noun, N=noun.capitalize())
        written = spell(draw, [verb, *noun.split()])
        tools.append(Tool(verb, noun, ToolDescription(written, about, schema_of([one])), [one]))
    first, second = tools
    others = toolbox(draw, draw.integer(0, 2), avoid | {"weather", "alarm"}, known=0.0)
    box = [*tools, *(one for one in others if one.noun not in avoid)]
    draw.rng.shuffle(box)
    dialogue = _start(draw, box, "two_calls")
    dialogue.user(
        draw.pick(_SHARED).format(
            a=first.noun, b=second.noun, v=value, x=draw.pick(("in", "for", "of", "at"))
        )
    )
    pairs = [(tool, {tool.fields[0].name: value}) for tool in tools]
    if draw.chance(0.5):
        return _replayed_two(draw, dialogue, pairs)
    return _one_after_the_other(draw, dialogue, pairs)


def _one_after_the_other(
    draw: Draw, dialogue: Dialogue, pairs: list[tuple[Tool, dict[str, Any]]]
) -> Dialogue:
    """Adds the calls with their results, and an answer that uses all of them."""
    texts, needed = [], []
    for tool, values in pairs:
        _think_call(dialogue, tool, values)
        dialogue.call(tool.description.name, compact(values))
        returned, text, must = result(draw)
        dialogue.result(f"functions.{tool.description.name}", returned)
        texts.append(text)
        needed += must
    _answer(dialogue, " ".join(texts))
    calls = [(tool.description.name, values) for tool, values in pairs]
    dialogue.answer = {"calls": calls, "needed": needed}
    return dialogue


_SHARED = (
    "What are the {a} and the {b} {x} {v}?", "What is the {a} and {b} {x} {v}?", "Tell me the {a} and the {b} {x} {v}.",
    "{a} and {b} {x} {v}", "I need the {a} and the {b} {x} {v}.", "What's the {a} and the {b} {x} {v}?",
    "What is the {a} {x} {v}, and what is the {b} there?", "What's the {a} {x} {v} and what's the {b}?",
    "For {v}, give me the {a} and the {b}.", "Show me {a} and {b} {x} {v}, please.", "First the {a}, then the {b} {x} {v}.",
    "Both the {a} and the {b} {x} {v}, please", "How is the {a} {x} {v}? And the {b}?", "Get the {a} {x} {v} and then its {b}.",
    "Can you tell me the {a} and also the {b} {x} {v}?", "I am in {v}. What are the {a} and the {b}?",
)  # fmt: skip


def _replayed_two(draw: Draw, dialogue: Dialogue, pairs: list[tuple[Tool, dict[str, Any]]]) -> Dialogue:
    """The client replays the first call or both, so the second call or the answer is still to be written.

    Both results may follow both calls, as with parallel calls.
    """
    both = draw.chance(0.7)
    replayed = pairs if both else pairs[:1]
    texts, needed, late = [], [], []
    is_parallel = both and draw.chance(0.4)
    for tool, values in replayed:
        name = tool.description.name
        _replay_call(draw, dialogue, name, values)
        returned, text, must = result(draw)
        came = Message(
            "tool", returned, name=f"functions.{name}", recipient="assistant", channel="commentary"
        )
        (late if is_parallel else dialogue.history).append(came)
        texts.append(text)
        needed += must
    dialogue.history += late
    for tool, values in pairs[len(replayed) :]:
        _think_call(dialogue, tool, values)
        dialogue.call(tool.description.name, compact(values))
        returned, text, must = result(draw)
        dialogue.result(f"functions.{tool.description.name}", returned)
        texts.append(text)
        needed += must
    _answer(dialogue, " ".join(texts))
    calls = [(tool.description.name, values) for tool, values in pairs[len(replayed) :]]
    dialogue.answer = {"calls": calls, "needed": needed}
    return dialogue


def past_calls(draw: Draw, dialogue: Dialogue, tools: list[Tool]) -> None:
    """Adds a turn with a call and its result before the history."""
    history, dialogue.history = dialogue.history, []
    tool = draw.pick(tools)
    request, values = ask(draw, tool)
    name = tool.description.name
    dialogue.user(request)
    _replay_call(draw, dialogue, name, values)
    returned, text, _ = result(draw)
    dialogue.history.append(
        Message("tool", returned, name=f"functions.{name}", recipient="assistant", channel="commentary")
    )
    dialogue.past_answer(text)
    dialogue.history += history


def same_tool_twice(draw: Draw) -> Dialogue:
    """ "The weather in A and in B": one tool, two values."""
    tool = None
    while tool is None or len(tool.fields) != 1 or not str(tool.fields[0].value).replace(" ", "").isalpha():
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
    if draw.split == "train" and draw.chance(0.4):
        return _replayed_two(draw, dialogue, [(tool, {one.name: value}) for value in (one.value, other)])
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
