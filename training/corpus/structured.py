"""JSON for a schema in the developer message, values from the user's sentence."""

from __future__ import annotations

from typing import Any

from chorale.harmony.messages import ResponseFormat
from training.corpus.base import Dialogue, Draw
from training.corpus.fields import Field, compact, fields, join, mention, schema_of

# What people extract from plain sentences: ((names, kind) of each field, sentences).
RECORDS: tuple[tuple[tuple[tuple[tuple[str, ...], str], ...], tuple[str, ...]], ...] = (
    (((("name", "full_name", "person"), "name"), (("age", "years"), "integer"), (("city", "town", "location"), "name")),
     ("{0} is {1} years old and lives in {2}.", "{0}, {1}, lives in {2}.", "My name is {0}, I am {1} and live in {2}.",
      "I am {0} from {2} and I am {1} years old.", "In {2} lives {0}, who is {1}.", "{0} ({1}) from {2}", "{0} is {1} and from {2}.",
      "{0} from {2} is {1} years old.", "{1} years old, {0}, {2}", "{0} is {1}, lives in {2}.", "This is {0}, {1}, from {2}.",
      "{0} lives in {2} and is {1} years old.", "My name is {0}, I am {1} years old and from {2}.")),
    (((("product", "item", "name"), "word"), (("price", "cost"), "number"), (("quantity", "count", "amount"), "integer")),
     ("{2} pieces of {0} at {1} each.", "The {0} costs {1} and we have {2}.", "Order {2} of {0} for {1} each.",
      "I want {2} {0} at {1}.", "We sold {2} of the {0} for {1}.", "{0}: {2} in stock, {1} each",
      "Buy {2} {0} for {1} each.", "{2} x {0} at {1}", "The price of the {0} is {1}, {2} are left.", "{2} {0}, {1} each",
      "I need {2} {0} at {1} each.", "We have {2} {0} for {1}.")),
    (((("event", "name", "title"), "name"), (("date", "day"), "marked"), (("place", "location", "venue"), "name")),
     ("{0} takes place on {1} in {2}.", "On {1} there is {0} in {2}.", "Join us for {0} at {2} on {1}.",
      "{0} in {2}, {1}.", "The date of {0} in {2} is {1}.",
      "{2} hosts {0} on {1}.", "{0} will be in {2} on {1}.", "{1}: {0} in {2}", "Come to {0} in {2} on {1}.",
      "{0} is on {1} in {2}.", "On {1} {0} takes place in {2}.")),
    (((("title", "book", "name"), "name"), (("author", "writer"), "name"), (("year", "published"), "integer")),
     ("{0} was written by {1} in {2}.", "{1} wrote {0} in {2}.", "{0} by {1} ({2})", "In {2} {1} published {0}.",
      "The book {0} is from {1}, year {2}.", "{0}, {1}, {2}",
      "{0} ({2}) by {1}", "{1} is the author of {0}, {2}.", "Written by {1} in {2}: {0}", "{1} published {0} in {2}.",
      "The book {0} was written by {1} in {2}.", "In {2} {1} wrote {0}.")),
    (((("name", "customer"), "name"), (("email", "contact"), "mail")),
     ("{0} can be reached at {1}.", "Write to {0} at {1}.", "{0} <{1}>", "Contact {0}: {1}", "The e-mail of {0} is {1}.",
      "{0} has the address {1}.", "You reach {0} at {1}.", "{1} is the mail of {0}.", "{0}: {1}", "Mail {0}: {1}",
      "The address of {0} is {1}.", "{0} reads {1}.")),
)  # fmt: skip


def natural_record(draw: Draw) -> tuple[list[Field], str]:
    """(fields with values, the sentence they are in)."""
    columns, sentences = draw.pick(RECORDS)
    chosen = []
    for names, kind in columns:
        name = draw.pick(names)
        value, schema_type = _record_value(draw, kind)
        chosen.append(Field(name, name, {"type": schema_type}, value, str(value)))
    text = str(draw.phrase(sentences)).format(*(one.shown for one in chosen))
    if draw.chance(0.3):
        draw.rng.shuffle(chosen)
    return chosen, text


def _record_value(draw: Draw, kind: str) -> tuple[Any, str]:
    if kind == "integer":
        return draw.integer(1, draw.pick((99, 999, 2030))), "integer"
    if kind == "number":
        return draw.integer(0, 99) + draw.integer(1, 9) / 10, "number"
    if kind == "mail":
        return f"{draw.word()}@{draw.word()}.com", "string"
    if kind == "marked":
        return f"20{draw.integer(20, 39)}-{draw.integer(1, 12):02d}-{draw.integer(1, 28):02d}", "string"
    return draw.name() if kind == "name" else draw.word(), "string"


def json_answer(draw: Draw) -> Dialogue:
    chosen = fields(draw, draw.integer(1, 6))
    natural = draw.chance(0.25)
    if natural:
        chosen, sentence = natural_record(draw)
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
    lead = draw.phrase((
        "Make a {t}: {x}.", "Extract this: {x}.", "Fill the form: {x}.", "Here is the data: {x}.", "{x}",
        "Please record {x}.", "Give me the JSON for {x}.", "I have {x}. Put it into the format.", "Note {x}.",
        "Convert this to JSON: {x}", "Save {x}.", "Turn this into the format: {x}.",
    ))  # fmt: skip
    if natural:
        before = draw.pick(("", "", "Extract: ", "Extract the data: ", "Give me JSON. ", "Fill the form: "))
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
