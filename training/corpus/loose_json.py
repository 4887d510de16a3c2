"""JSON without a schema (response_format json_object, or just "as JSON"), and JSON that a grammar forces."""

from __future__ import annotations

from typing import Any

from training.corpus import arithmetic, calculation, lists, loose_asks, talk
from training.corpus.base import Dialogue, Draw, Phrases
from training.corpus.entities import person, place
from training.corpus.fields import Field, compact, fields, join

_OBJECTS = Phrases(
    (
        "Give me a JSON object with {k} for {v}.", "Return a JSON object with {k}: {v}", "Write a JSON object with the keys {k} for {v}", "JSON with {k} for {v}", "Make a JSON object with {k}: {v}",
        "A JSON object with {k}, please: {v}", "Create JSON with {k} from this: {v}", "Give me JSON with {k}: {v}", "{v}. Return a JSON object with {k}.", "{v} - as a JSON object with {k}",
        "Answer with a JSON object that has {k}. {v}", "I need a JSON object with {k} for {v}", "Produce a JSON object with keys {k}: {v}", "Output JSON ({k}): {v}", "json with {k} for {v}",
        "Show {v} as JSON with {k}", "Put {v} into a JSON object with {k}.", "Please return JSON with the fields {k}: {v}", "Generate a JSON object with {k} for {v}", "Reply in JSON with {k}: {v}",
        "{v}. JSON with {k}, please.", "Write JSON with {k}. Use {v}.", "Return JSON with fields {k} for {v}", "Give me an object with {k} for {v} in JSON.",
    ),
    ("Please give me a JSON object with {k} for {v}.", "Build a JSON object with {k}: {v}"),
    ("Could you return {v} as a JSON object with {k}?", "I'd like JSON with {k} for {v}."),
)  # fmt: skip
_MENTIONED = Phrases(
    (
        "Return this as JSON: {x}", "JSON object: {x}", "Give me a JSON object where {x}", "Write a JSON object with {x}.", "Make JSON of this: {x}", "{x}. As JSON please.", "Turn this into JSON: {x}",
        "Convert to JSON: {x}", "Return a JSON object with {x}", "Answer in JSON: {x}", "Give me JSON: {x}", "Create a JSON object with {x}", "I want a JSON object: {x}", "json: {x}", "Output as JSON: {x}",
        "Respond with JSON: {x}", "Give me a JSON object with {x}.", "Express this as JSON: {x}",
    ),
    ("Please write JSON with {x}.",),
    ("Show this as a JSON object: {x}", "Could you make a JSON object with {x}?"),
)  # fmt: skip


def _people(draw: Draw) -> list[Field]:
    """Common records that people try first: name and age, city and so on."""
    able: dict[str, Any] = {
        "name": person(draw), "age": draw.integer(1, 99), "city": place(draw), "country": draw.name(), "email": f"{draw.word()}@{draw.word()}.com", "job": draw.word(),
        "year": draw.integer(1900, 2030), "color": draw.word(), "price": draw.integer(1, 999), "title": draw.name(), "id": draw.integer(1, 9999), "active": draw.chance(0.5),
    }  # fmt: skip
    names = ["name", "age"] if draw.chance(0.35) else draw.rng.sample(list(able), draw.integer(1, 4))
    if draw.chance(0.2) and "city" not in names:
        names.append("city")
    return [Field(name, name, {}, able[name], compact({"v": able[name]})[5:-1].strip('"')) for name in names]


def bare(draw: Draw) -> Dialogue:
    """The message states the keys and values; there is no schema."""
    if draw.chance(0.65):
        return _answered(draw, *loose_asks.request(draw))
    if draw.chance(0.6):
        chosen = _people(draw)
        keys = [one.name for one in chosen]
        shown = [f'"{key}"' for key in keys] if draw.chance(0.15) else keys
        spoken = draw.pick(
            (", ".join(shown), f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0])
        )
        values = (
            ", ".join(one.shown for one in chosen)
            if draw.chance(0.8)
            else join(draw, [one.shown for one in chosen])
        )
        question = draw.phrase(_OBJECTS).format(k=spoken, v=values)
    else:
        chosen = fields(draw, draw.integer(1, 4), described=0.0)
        question = draw.phrase(_MENTIONED).format(x=join(draw, _clear(draw, chosen)))
    return _answered(draw, question, {one.name: one.value for one in chosen})


_CLEAR = (
    "{s}: {v}",
    "{s}: {v}",
    "{s} = {v}",
    "{s}={v}",
    "{s} is {v}",
    "the {s} is {v}",
    "{s} -> {v}",
    "{s} {v}",
)


def _clear(draw: Draw, chosen: list[Field]) -> list[str]:
    """All pairs are written in one form: without a schema, only the form shows which words are the key."""
    ways = _CLEAR if all("_" not in one.name for one in chosen) else _CLEAR[:-1]
    way = draw.pick(ways)
    return [
        way.format(s=one.name, v=str(one.value).lower() if isinstance(one.value, bool) else one.shown)
        for one in chosen
    ]


def _answered(draw: Draw, question: str, values: dict[str, Any]) -> Dialogue:
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="bare_json")
    if draw.chance(0.25):
        dialogue.instructions = draw.pick(
            (
                "Answer in JSON.",
                "Respond only with JSON.",
                "You output JSON.",
                "You are a helpful assistant designed to output JSON.",
                "Return a JSON object.",
            )
        )
    dialogue.user(question)
    _think(dialogue, values)
    return _say(dialogue, values)


def _think(dialogue: Dialogue, values: dict[str, Any]) -> None:
    if dialogue.effort == "medium":
        dialogue.think(f"I write JSON with {', '.join(values)}.")
    elif dialogue.effort == "high":
        said = "; ".join(f"{name} is {compact({'v': value})[5:-1]}" for name, value in values.items())
        dialogue.think(
            f"The user wants JSON with {', '.join(values)}. From the text: {said}. I write only the JSON."
        )


def _say(dialogue: Dialogue, values: dict[str, Any]) -> Dialogue:
    dialogue.say(compact(values))
    dialogue.answer = {"text": compact(values)}
    return dialogue


_PLAIN = (
    talk.chat,
    talk.cannot,
    arithmetic.sums,
    arithmetic.products,
    lists.reverse,
    lists.copy,
    lists.nth,
    calculation.division,
    calculation.of_list,
)
_AS_JSON = ("{x} Answer in JSON.", "{x} Reply as JSON.", "In JSON: {x}", "{x} (JSON)", "Answer in JSON: {x}", "{x} Give the answer as JSON.", "{x} Use JSON.", "As a JSON object: {x}", "{x} Return JSON.",
            "JSON only: {x}", "{x} Answer as a JSON object.", "Reply with JSON: {x}")  # fmt: skip


def asked(draw: Draw) -> Dialogue:
    """Any request with "answer in JSON": the answer is in one field."""
    dialogue = draw.pick(_PLAIN)(draw)
    question = str(dialogue.history[-1].content)
    del dialogue.history[-1]
    if draw.chance(0.3):
        dialogue.instructions = draw.pick(
            (
                "Answer in JSON.",
                "Respond only with JSON.",
                "You output JSON.",
                "You are a helpful assistant designed to output JSON.",
            )
        )
        dialogue.user(question)
    else:
        dialogue.user(draw.phrase(_AS_JSON).format(x=question if question[-1:] in ".?!" else question + "."))
    return _in_json(dialogue)


def _in_json(dialogue: Dialogue) -> Dialogue:
    said = dialogue.target.pop().content
    answer = dialogue.answer.get("result", said)  # a number if it is one
    dialogue.family = "bare_json"
    return _say(dialogue, {"answer": answer})


def forced(draw: Draw) -> Dialogue:
    """The conversation does not ask for JSON, but a grammar allows nothing else: the answer is in one field."""
    dialogue = _in_json(draw.pick((*_PLAIN, talk.cannot, talk.chat))(draw))
    dialogue.forced = "brace"
    return dialogue
