"""People, companies, places, dates and amounts in one sentence, in any order; the request asks for one or all."""

from __future__ import annotations

from typing import Any

from chorale.harmony.messages import ResponseFormat
from training.corpus.base import Dialogue, Draw, Phrases
from training.corpus.entity_phrases import all_of, question, sentence
from training.corpus.fields import compact
from training.corpus.values import iso_date, spoken_day
from training.corpus.words import held_out

_FIRST_NAMES = (
    "Anna", "Jane", "John", "Maria", "Peter", "Paul", "Lisa", "Tom", "Sara", "David", "Emma", "Julia", "Mark", "Laura", "James", "Robert", "Linda", "Susan", "Karen", "Nancy", "Daniel", "Matthew", "Sophie", "Alice", "Bob", "Carol", "Eve", "Frank", "Grace", "Henry", "Ivan", "Jack", "Kate", "Leo", "Mia", "Noah", "Olivia", "Oscar", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Yuki", "Omar", "Fatima", "Ahmed", "Priya", "Wei", "Chen", "Hans", "Greta", "Pierre", "Claire", "Luca", "Giulia", "Carlos", "Elena", "Diego", "Lucia", "Igor", "Olga", "Sven", "Ingrid", "Mary", "Michael", "William", "Elizabeth", "Sarah", "Thomas", "Charles", "Emily", "Hannah", "Lucas", "Ben", "Max", "Nina", "Ella", "Liam", "Ethan", "Ava", "Chloe", "George", "Helen", "Simon", "Martin", "Andrea", "Stefan", "Eva", "Martha", "Kevin", "Brian",
)  # fmt: skip
_KINDS_OF_FIRM = ("Corp", "Inc", "Ltd", "GmbH", "Labs", "Group", "Systems", "& Co", "Industries", "Bank", "Foods", "Motors", "Airlines", "Software", "Technologies", "Media", "AG", "LLC", "Corporation",
                  "Partners", "Energy", "Studios", "Books", "Logistics", "Solutions", "Hotels", "Pharma", "Capital", "Insurance", "Airways", "Holding", "Stores", "Works", "Brothers", "Networks", "Chemicals", "Robotics", "Design", "Toys", "Telecom", "Railways")  # fmt: skip
_ROLES = ("engineer", "manager", "designer", "director", "CEO", "accountant", "lawyer", "developer", "analyst", "chief engineer", "head of sales", "consultant", "editor", "nurse", "teacher",
          "architect", "president", "marketing lead", "data scientist")  # fmt: skip
_CITIES = ("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Tokyo", "Boston", "Chicago", "Dublin", "Oslo", "Lima", "Cairo", "Sydney", "Toronto", "Munich", "Seattle", "Lisbon", "Prague", "Delhi",
           "Singapore", "Milan", "Geneva", "Warsaw", "New York", "San Francisco")  # fmt: skip


def person(draw: Draw) -> str:
    pool = [one for one in _FIRST_NAMES if held_out(one.lower()) == (draw.split != "train")] or ["Jane"]
    first = draw.pick(pool) if draw.chance(0.7) else draw.name().split()[0]
    return f"{first} {draw.name().split()[0]}" if draw.chance(0.75) else first


def company(draw: Draw) -> str:
    name = draw.name().split()[0]
    return f"{name} {draw.pick(_KINDS_OF_FIRM)}" if draw.chance(0.75) else name


def place(draw: Draw) -> str:
    pool = [one for one in _CITIES if held_out(one.lower()) == (draw.split != "train")]
    return draw.pick(pool) if pool and draw.chance(0.4) else draw.name()


def amount(draw: Draw) -> str:
    size = draw.integer(1, 999)
    return str(
        draw.pick(("${0}", "{0} dollars", "{0} euros", "${0} million", "€{0}", "{0} million euros", "£{0}"))
    ).format(size)


# {c}: company, {p}: person, {l}: place, {d}: date, {m}: amount of money, {r}: role
SENTENCES = Phrases(
    (
        "{c} hired {p} in {l}.", "{c} hired {p}.", "{c} has hired {p} as {r} in {l}.", "{p} works for {c} in {l}.", "{p} joined {c} on {d}.", "{c} was founded by {p} in {l}.", "{p} founded {c} in {l}.",
        "{c} opened an office in {l} on {d}.", "{c}, based in {l}, appointed {p} as {r}.", "{c} paid {p} {m}.", "On {d}, {c} signed a deal with {p} over {m}.", "{p} is {r} at {c}.",
        "{p}, {r} at {c}, moved to {l}.", "In {l}, {c} met {p} on {d}.", "{c} bought a building in {l} for {m}.", "{p} bought shares of {c} for {m}.", "{c} announced on {d} that {p} will lead its office in {l}.",
        "At {c}, {p} is the new {r}.", "{c} named {p} {r}.", "{c}'s {r} {p} lives in {l}.", "{r} {p} left {c} on {d}.", "{l}: {c} hires {p}.", "{c} of {l} owes {p} {m}.", "{c} from {l} employs {p}.",
        "The {r} of {c} is {p}.", "{c} promoted {p} to {r} on {d}.", "{c} sent {p} to {l}.", "{c} raised {m} in {l} on {d}.", "Last week {c} hired {p} as {r}.", "{p} of {c} flew to {l} on {d}.",
        "From {l}, {p} runs {c}.", "{c} has its seat in {l}; its {r} is {p}.", "{p} sold {c} for {m}.", "{d}: {c} meets {p} in {l}.", "Invoice from {c} to {p} over {m}, due {d}.",
        "{c} (of {l}) and {p} agreed on {m}.", "{c} fired {p} on {d}.", "{p} resigned from {c}.", "{c} invited {p} to {l} for {d}.", "Yesterday {p} started at {c} in {l}.", "{c} and {p} opened a shop in {l}.",
        "{c} acquired a company in {l} for {m}, said {p}.", '"We are growing", said {p} of {c} in {l}.', "{c} recruited {p} from {l}.", "{p} signed with {c} for {m}.", "{c} is led by {p}.", "{c} is moving to {l} on {d}.",
    ),
    ("{c} brought in {p} as {r} in {l}.", "In {l}, {p} was hired by {c} on {d}."),
    ("{c} welcomed {p} to its team in {l}.", "The company {c} gave {p} {m} on {d}.", "{p} has worked at {c} in {l} since {d}.", "{c} chose {p} as {r}."),
)  # fmt: skip
_LETTERS = {"c": "company", "p": "person", "l": "place", "d": "date", "m": "amount", "r": "role"}
_CALLED = {
    "company": (
        ("company", "organization", "employer", "firm", "business"),
        ("company", "firm", "organization"),
    ),
    "person": (("person", "name", "employee", "full_name", "person_name"), ("person", "name of the person")),
    "place": (("place", "city", "location"), ("place", "city", "location")),
    "date": (("date", "day", "when"), ("date", "day")),
    "amount": (("amount", "sum", "money", "price"), ("amount of money", "amount")),
    "role": (("role", "job", "position", "title", "job_title"), ("role", "job")),
}
_ONE = (
    "Which {k} is mentioned? {x}", "Extract the {k}: {x}", "Extract the {k} from this text: {x}", "What is the {k} in this sentence? {x}", "Find the {k}: {x}", "Name the {k}. {x}", "{x}\nWhich {k} is that?",
    "{x}\nExtract the {k}.", "Give me the {k}: {x}", "What {k} is named here: {x}", "the {k} in: {x}", "{x} What is the {k}?", 'Which {k} is in "{x}"?', 'Extract the {k} from "{x}"', "Tell me the {k}: {x}",
    "Which {k} does this text name? {x}", "{x}\nPlease name the {k}.", 'Find the {k} in the sentence "{x}"',
)  # fmt: skip
_ALL = (
    "Extract the entities: {x}", "Extract all entities from this text: {x}", "List the entities in this sentence: {x}", "Which entities are in this text? {x}", "Find the named entities: {x}", "Entities: {x}",
    "Extract {k} from: {x}", "Extract {k}: {x}", "{x}\nExtract {k}.", 'Find {k} in "{x}"', "List {k}: {x}", "Give me {k} of this text: {x}", "{x}\nList the entities.", 'Named entities of "{x}"?',
    "Pull {k} out of this: {x}", "Which entities does this name? {x}", "Please extract {k} from this sentence: {x}",
)  # fmt: skip


def _drawn(draw: Draw) -> tuple[str, dict[str, str]]:
    """Returns (sentence, kind -> value in the order of the sentence)."""
    pattern = sentence(draw) if draw.chance(0.5) else draw.phrase(SENTENCES)
    values = {
        "c": company(draw), "p": person(draw), "l": place(draw), "m": amount(draw), "r": draw.pick(_ROLES),
        "d": iso_date(draw) if draw.chance(0.4) else spoken_day(draw),
    }  # fmt: skip
    text = pattern.format(**values)
    order = sorted(
        (pattern.index(f"{{{letter}}}"), letter) for letter in values if f"{{{letter}}}" in pattern
    )
    return text, {_LETTERS[letter]: values[letter] for _, letter in order}


def plain(draw: Draw) -> Dialogue:
    """Asks for one entity, or for all of them, one per line."""
    text, found = _drawn(draw)
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="entities")
    if draw.chance(0.55):
        kind = draw.pick(list(found))
        asked = question(draw, kind, text) if draw.chance(0.5) else None
        asked = asked or draw.phrase(_ONE).format(k=draw.pick(_CALLED[kind][1]), x=text)
        answer, thought = found[kind], f"The {kind} is {found[kind]}."
    else:
        pattern = draw.phrase(_ALL)
        if "{k}" in pattern:
            kinds = draw.rng.sample(list(found), draw.integer(2, len(found)))
            found = {kind: found[kind] for kind in kinds}
        names = [f"the {kind}" for kind in found]
        asked = pattern.format(k=f"{', '.join(names[:-1])} and {names[-1]}", x=text)
        answer = "\n".join(f"{kind.capitalize()}: {value}" for kind, value in found.items())
        thought = f"I look for {', '.join(found)}."
    dialogue.user(asked)
    if dialogue.effort == "medium":
        dialogue.think(thought)
    elif dialogue.effort == "high":
        dialogue.think(f"The user wants something from the text. {thought} I answer with that.")
    dialogue.say(answer)
    dialogue.answer = {"text": answer}
    return dialogue


def as_json(draw: Draw) -> Dialogue:
    """Asks for the entities in the form of a schema."""
    text, found = _drawn(draw)
    kinds = list(found)
    if len(kinds) > 1 and draw.chance(0.3):
        kinds.remove(draw.pick(kinds))
    if draw.chance(0.5):
        draw.rng.shuffle(kinds)
    values: dict[str, Any] = {draw.pick(_CALLED[kind][0]): found[kind] for kind in kinds}
    properties = {name: {"type": "string"} for name in values}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(values)}
    if draw.chance(0.5):
        schema["additionalProperties"] = False
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="entities_json")
    dialogue.formats = (
        ResponseFormat(draw.pick(("entities", "response", "extraction", "record", "answer")), schema, None),
    )
    names = " and ".join(name.replace("_", " ") for name in values)
    before = draw.phrase(("", "Extract the entities: ", f"Extract {names}: ", "Who works where? ", "Extract the data: ", "Text: ", "Fill the form: ", "Extract: ", "Find the entities: ", "What does this say? ",
                          "Please extract the entities. ", "Read out the details: "))  # fmt: skip
    spoken = [name.replace("_", " ") for name in values]
    dialogue.user(all_of(draw, spoken, text) if draw.chance(0.5) else f"{before}{text}")
    if dialogue.effort == "medium":
        dialogue.think(f"I fill {', '.join(values)}.")
    elif dialogue.effort == "high":
        said = "; ".join(f"{name} is {value}" for name, value in values.items())
        dialogue.think(f"The format wants {', '.join(values)}. From the text: {said}. I write only the JSON.")
    dialogue.say(compact(values))
    dialogue.answer = {"json": values, "schema": schema}
    return dialogue
