"""JSON for a schema in the developer message, values from the user's sentence."""

from __future__ import annotations

from typing import Any

from chorale.harmony.messages import ResponseFormat
from training.corpus.arithmetic import SUM, pair
from training.corpus.base import Dialogue, Draw, Phrases
from training.corpus.fields import Field, compact, fields, join, mention, schema_of
from training.corpus.records import RECORDS
from training.corpus.slots import listed
from training.corpus.values import iso_date, mail, spoken_day


def natural_record(draw: Draw) -> tuple[list[Field], str]:
    """Returns (fields with values, the sentence that contains them)."""
    record = draw.pick([one for one in RECORDS if one.sentences.of(draw.split)])
    chosen = []
    for names, kind in record.columns:
        name = draw.pick(names)
        value, schema_type = _record_value(draw, kind)
        schema: dict[str, Any] = {"type": schema_type}
        if schema_type == "array":
            schema["items"] = {"type": "string"}
        if draw.chance(0.2):
            schema["description"] = draw.pick(("The {0}", "{0} of it", "Its {0}")).format(
                name.replace("_", " ")
            )
        chosen.append(Field(name, name, schema, value, listed(value) if kind == "names" else str(value)))
    text = draw.phrase(record.sentences).format(*(one.shown for one in chosen))
    if len(chosen) > 1 and draw.chance(0.2):
        chosen.remove(draw.pick(chosen))  # the sentence states more than the schema requires
    if draw.chance(0.3):
        draw.rng.shuffle(chosen)
    return chosen, text


def _record_value(draw: Draw, kind: str) -> tuple[Any, str]:
    if kind == "names":
        return [draw.name() for _ in range(draw.integer(1, 4))], "array"
    if kind == "integer":
        return draw.integer(1, draw.pick((99, 999, 2030))), "integer"
    if kind == "number":
        return draw.integer(0, 99) + draw.integer(1, 9) / 10, "number"
    if kind == "mail":
        return mail(draw), "string"
    if kind == "date":
        return iso_date(draw) if draw.chance(0.6) else spoken_day(draw), "string"
    if kind == "phrase":
        return " ".join(draw.words(draw.integer(1, 4))), "string"
    return draw.name() if kind == "name" else draw.word(), "string"


LEADS = Phrases(
    (
        "Make a {t}: {x}.", "Extract this: {x}.", "Fill the form: {x}.", "Here is the data: {x}.", "{x}",
        "Please record {x}.", "Give me the JSON for {x}.", "I have {x}. Put it into the format.", "Note {x}.",
        "Convert this to JSON: {x}", "Write it down: {x}.", "Data: {x}", "Keep {x}.", "Make JSON of this: {x}", "Store this: {x}.",
        "Return JSON: {x}", "The values: {x}.", "We have {x}.", "Enter this: {x}", "As JSON: {x}", "New {t}: {x}", "Format this: {x}.",
        "Take this down: {x}", "Register {x}.", "Bring this into shape: {x}.", "JSON please: {x}", "Add {x}.", "It says: {x}.", "{t}: {x}",
        "Please structure this: {x}", "Change this into JSON: {x}", "I want a {t} where {x}.",
    ),
    ("Save {x}.", "Turn this into the format: {x}."),
    ("Put this into the form: {x}.", "Write the JSON for this: {x}", "Fill in {x}."),
)  # fmt: skip
BEFORE_RECORD = (
    "", "", "Extract: ", "Extract the data: ", "Give me JSON. ", "Fill the form: ", "Extract the record: ", "Read this: ", "As JSON: ",
    "Text: ", "What does this say? ", "Please extract: ",
)  # fmt: skip


def _sum_as_json(draw: Draw) -> tuple[list[Field], str]:
    """A sum whose result is the only field."""
    a, b = pair(draw, 100, "+")
    name = draw.pick(("answer", "result", "sum", "total", "value"))
    return [Field(name, name, {"type": "integer"}, a + b, str(a + b))], draw.phrase(SUM).format(a=a, b=b)


def json_answer(draw: Draw) -> Dialogue:
    chosen = fields(draw, draw.integer(1, 6))
    natural = draw.chance(0.35)
    if natural:
        is_sum = draw.split == "train" and draw.chance(0.06)
        chosen, sentence = _sum_as_json(draw) if is_sum else natural_record(draw)
    schema = schema_of(chosen)
    if draw.chance(0.5):
        schema["additionalProperties"] = False
    title = draw.pick(
        (
            "response",
            "answer",
            "record",
            "output",
            "person",
            "schema",
            "result",
            "data",
            draw.word(),
            "_".join(draw.words(2)),
        )
    )
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="json")
    dialogue.formats = (ResponseFormat(title, schema, draw.pick((None, None, f"A {draw.word()}"))),)
    if draw.chance(0.3):
        dialogue.instructions = draw.pick(
            ("Extract the data.", "Answer in JSON.", "You fill forms.", "Return the record.")
        )
    told = list(chosen)
    if draw.chance(0.5):
        draw.rng.shuffle(told)
    lead = draw.phrase(LEADS)
    if natural:
        before = draw.pick(BEFORE_RECORD)
        dialogue.user(f"{before}{sentence}")
    else:
        dialogue.user(lead.format(t=draw.word(), x=join(draw, [mention(draw, one) for one in told])))
    values = {one.name: one.value for one in chosen}
    if dialogue.effort == "medium":
        dialogue.think(f"I fill {', '.join(values)}.")
    elif dialogue.effort == "high":
        said = "; ".join(f"{one.name} is {compact_value(one.value)}" for one in chosen)
        dialogue.think(f"The format wants {', '.join(values)}. From the text: {said}. I write only the JSON.")
    dialogue.say(compact(values))
    dialogue.answer = {"json": values, "schema": schema}
    return dialogue


def compact_value(value: object) -> str:
    return compact({"v": value})[5:-1]
