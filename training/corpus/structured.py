"""JSON for a schema in the developer message, values from the user's sentence."""

from __future__ import annotations

from chorale.harmony.messages import ResponseFormat
from training.corpus.base import Dialogue, Draw
from training.corpus.fields import compact, fields, join, mention, schema_of


def json_answer(draw: Draw) -> Dialogue:
    chosen = fields(draw, draw.integer(1, 6))
    schema = schema_of(chosen)
    if draw.chance(0.5):
        schema["additionalProperties"] = False
    title = draw.pick(("response", "answer", "record", "output", draw.word(), "_".join(draw.words(2))))
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
