"""Requests for JSON without a schema, assembled from parts: the record, its form, and the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.corpus.base import Draw
from training.corpus.entities import _FIRST_NAMES, place
from training.corpus.fields import compact
from training.corpus.values import iso_date
from training.corpus.words import held_out

_JOBS = (
    "baker",
    "teacher",
    "nurse",
    "painter",
    "farmer",
    "singer",
    "lawyer",
    "plumber",
    "dentist",
    "writer",
    "cook",
    "tailor",
    "driver",
    "builder",
    "gardener",
    "doctor",
    "actor",
    "judge",
)
_COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "purple", "grey", "orange", "pink")
_STATES = ("ok", "done", "closed", "ready", "failed", "new", "sent", "paid", "on", "off", "active", "pending")
_VERBS = (
    "Describe", "Format", "Make", "Return", "Show", "Write", "Put", "Represent", "Render", "Print", "Give", "Serialize", "Export", "Output", "Turn", "Convert", "Transform", "Record", "Note", "List", "Enter", "Model",
    "Encode", "Present", "Dump", "Send", "Write down", "Type", "Report", "Change", "Translate", "Pack", "Bring", "Deliver", "Provide", "Capture", "Structure", "Lay out", "Set down", "Summarise", "Spell out", "Take",
    "Register", "Log", "Document", "Emit", "Produce", "Reformat", "Parse", "Map", "Cast", "Please format", "Please show", "Please write", "Can you write", "Could you put", "Kindly return", "Now give", "Just write",
    "Use", "Keep", "Insert", "Add", "Define", "State", "Copy", "Assemble", "Compose", "Construct", "Form", "Generate", "Create", "Build", "Prepare", "Draw up",
    "Express", "Store", "Wrap", "Save", "Package", "Hand over", "Would you render", "Please serialise", "Sum up", "Pass", "Set", "Fill in", "Translate",
)  # fmt: skip
_LEADS = (
    "I need", "I want", "Give me", "Return", "Make", "Please send", "Please send me", "Could I have", "Can you make", "Build", "Create", "Write", "Reply with", "Respond with", "Answer with", "Show me", "Produce", "Generate",
    "Output", "I would like", "Let me have", "Just give", "Print", "Compose", "Can you give me", "Could you write", "Would you make", "Please make", "Please return", "Send", "Provide", "We need", "Prepare", "Now write",
    "Hand me", "Render", "Emit", "Only return", "Send back", "Come back with", "Write me", "Make me", "Draft", "Construct", "You should return", "I am after", "Looking for", "Have you got", "Form", "Put together", "",
    "Get me", "Can I get", "I'd want", "Deliver", "Kindly give", "Fetch me", "Please create", "May I have", "I should like", "Time for",
)  # fmt: skip
_JSON = (
    "JSON",
    "JSON",
    "JSON",
    "json",
    "a JSON object",
    "a JSON object",
    "an object",
    "a json",
    "a JSON",
    "a json object",
    "JSON object",
    "one JSON object",
    "a small JSON",
    "some JSON",
    "valid JSON",
    "plain JSON",
    "proper JSON",
)
_WITH = (
    "with",
    "with",
    "using",
    "with keys",
    "with the keys",
    "with the fields",
    "having",
    "containing",
    "that has",
    "whose keys are",
    "with fields",
    "of",
    "made of",
    "with the two",
    "holding",
    "including",
)
# {k}: the keys, {b}: in braces, {v}: the values, {p}: pairs, {j}: "a JSON object", {w}: with, {d}: a verb, {l}: "I need", {s}: a sentence
_APART = (
    "{d} {v} as {j} {w} {k}", "{d} {v} as {j} {w} {k}", "{d} {v} as {j} ({k})", "{d} {v} in {j} {w} {k}", "{v} -> {j} {w} {k}", "{v} => {j} ({k})", "{v} as {j} {w} {k}", "{v}, in {j} {w} {k}", "{v}. {l} {j} {w} {k}",
    "{v}: {j} {w} {k}", "{v} - {j}, {k}", "{l} {j} {w} {k} for {v}", "{l} {j} {w} {k} for {v}", "{l} {j} {w} {k}: {v}", "{l} {j} {w} {k} from {v}", "{l} {j} ({k}): {v}", "{l} {b} for {v}", "{l} {b} for {v}",
    "{b} for {v}", "{b} of {v}", "{b} -> {v}", "{l} {b}: {v}", "{v} as {b}", "{d} {v} as {b}", "{l} {k} as {j} for {v}", "{l} {k} in {j}: {v}", "{k} as {j}: {v}", "{j}, keys {k}, values {v}", "keys {k}; values {v}; {j}",
    "{l} {j}. Keys: {k}. Values: {v}", "{j} {w} {k}; {v}", "{j} {w} {k} - {v}", "{j} for {v} ({k})", "{k} for {v}, as {j}", "{l} {j}: {k} are {v}", "{d} {k} ({v}) as {j}", "for {v}, {l} {j} {w} {k}", "From {v} make {j} {w} {k}",
    "{v} | {k} | json", "json {k}: {v}", "Data: {v}. Keys: {k}. {j}.", "Take {v} and write {j} {w} {k}", "{l} {j} about {v} {w} {k}", "{v}. {k}. {j}!", "{d} {v}: {j} {w} {k}", "{j} {w} {k} to describe {v}",
    "{v} into {j} {w} {k}", "{l} {j} out of {v} {w} {k}", "{v}, please as {j} {w} {k}", "{l} {b} with {v} filled in", "{v} ~ {b}", "Given {v}, {l} {j} {w} {k}", "{k} = {v} in {j}", "With {k} as keys: {v}. {j}", "{v} needs {j} {w} {k}",
)  # fmt: skip
_PAIRED = (
    "{l} {j} with {p}", "{l} {j} with {p}", "{l} {j}: {p}", "{l} {j} where {p}", "{l} {j} holding {p}", "{l} {j} containing {p}", "{l} {j} saying {p}", "{d} {p} as {j}", "{d} {p} into {j}", "{p}. {l} {j}", "{p} - json", "{p} -> {j}",
    "{p} => {j}", "{p} as {j}", "{p} in {j}", "{p}, {j} please", "{p}; json", "{j}: {p}", "{j} {p}", "{d} {j} {p}", "{d} {j}: {p}", "{{}} with {p}", "{{}} holding {p}", "{l} {j} that says {p}", "{l} {j} in which {p}", "{l} {j} for this: {p}",
    "{j} for a {n} with {p}", "A {n} with {p}, as {j}", "{l} {j} for a {n}: {p}", "{n} {p} -> json", "{n}: {p}. {j}", "{d} a {n} ({p}) as {j}", "This in {j}: {p}", "Data for {j}: {p}", "{p}. That as {j}.", "{p}. Make it {j}", "{p} (json)",
    "{d} this in {j}: {p}", "Only {j}: {p}", "{l} {j} of this {n}: {p}", "json {p}", "{p}, all in {j}", "{l} {j} with exactly {p}", "From this: {p}. {l} {j}", "{l} an object whose keys and values are {p}",
    "{p} please in {j}", "{l} {j} stating {p}", "{{}} out of {p}", "There is a {n} with {p}. {j}!", "{l} {j} that contains {p}", "{p}, and now {j}", "My {n}: {p}. {l} {j}", "{j} from {p}", "{d} {p} to {j}",
)  # fmt: skip
_SINGLE = (
    "the key {k} and the value {v}",
    "key {k} and value {v}",
    "key {k}, value {v}",
    "a key {k} with value {v}",
    "{k} as the key and {v} as the value",
    "one key {k} and one value {v}",
    "the value {v} under the key {k}",
    "{k} set to {v}",
    "only {k}, which is {v}",
    "value {v} for key {k}",
    "the single key {k} whose value is {v}",
)
_SAID = {
    ("name", "job"): ("{0} is a {1}.", "{0} is a {1} by trade.", "My friend {0} is a {1}.", "{0} has a job as a {1}.", "{0}, a {1}.", "{0} became a {1}.", "The {1} is called {0}.", "{0} is our {1}.", "{0} earns money as a {1}.", "{0} started as a {1}."),
    ("name", "age"): ("{0} is {1} years old.", "{0} is {1}.", "{0} turned {1}.", "{0} has turned {1} today.", "At {1}, {0} is young.", "My son {0} is {1}.", "{0} will be {1} soon.", "There is {0}, {1} years of age.", "{0} reached the age of {1}.", "{0} celebrates being {1}."),
    ("name", "city"): ("{0} is from {1}.", "{0} comes from {1}.", "{0} moved to {1}.", "My friend {0} is in {1}.", "{0} grew up in {1}.", "In {1} I met {0}.", "{0} has a flat in {1}.", "{0} works in {1}.", "{0} resides in {1}.", "{0} settled in {1}."),
    ("title", "year"): ("{0} came out in {1}.", "{0} is from {1}.", "{0} appeared in {1}.", "{0} was written in {1}.", "In {1} there was {0}.", "{0} was published in {1}.", "{0} dates from {1}."),
    ("product", "price"): ("The {0} costs {1}.", "A {0} is {1} euros.", "For the {0} I paid {1}.", "The {0} is sold for {1}.", "One {0}, {1} dollars.", "You get the {0} for {1}.", "They ask {1} for the {0}."),
}  # fmt: skip
_ABOUT = (
    "{s} {l} {j} {w} {k}.", "{s} {j} {w} {k}", "{s} {l} {k} as {j}", "{s} {k} as {j}", "{l} {j} {w} {k}. {s}", "{l} {k} as {j}. {s}", "{j} {w} {k}: {s}", "{l} {j} ({k}) from this: {s}", "{s} {d} that as {j} {w} {k}", "{l} {b}. {s}",
    "{s} -> {j} {w} {k}", "{s} {b}", "{d} this as {j} {w} {k}: {s}", "Read this and answer with {j} ({k}). {s}", "{k}, in {j}: {s}", "{s} Now the {k} as {j}", "{l} {j}. The keys are {k}. {s}", "Text: {s} {l} {j} {w} {k}", "{s} That in {j}, {w} {k}.",
    "{s} From that, {j} {w} {k}",
)  # fmt: skip
_NOUNS = (
    "user",
    "person",
    "product",
    "book",
    "city",
    "record",
    "client",
    "place",
    "item",
    "car",
    "customer",
    "film",
    "thing",
    "house",
    "player",
)


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    value: Any
    shown: str


def _name(draw: Draw) -> str:
    pool = [one for one in _FIRST_NAMES if held_out(one.lower()) == (draw.split != "train")]
    return str(draw.pick(pool)) if pool and draw.chance(0.5) else draw.name()


def _able(draw: Draw) -> dict[str, Any]:
    """Returns keys that people try first, each with a value."""
    price = (
        draw.integer(1, 999) if draw.chance(0.6) else draw.integer(1, 99) + draw.pick((0.99, 0.5, 0.95, 0.25))
    )
    return {
        "name": _name(draw), "age": draw.integer(1, 99), "city": place(draw), "country": draw.name(), "job": draw.pick(_JOBS) if draw.chance(0.6) else draw.word(),
        "email": f"{draw.word()}{draw.pick(('', '', '.' + draw.word()))}@{draw.word()}.{draw.pick(('com', 'org', 'net', 'de', 'io'))}", "year": draw.integer(1800, 2030), "title": draw.name(), "price": price,
        "color": draw.pick(_COLOURS) if draw.chance(0.6) else draw.word(), "id": draw.integer(1, 9999), "active": draw.chance(0.5), "date": iso_date(draw), "url": f"https://{draw.word()}.{draw.pick(('com', 'org', 'net'))}{draw.pick(('', '/' + draw.word()))}",
        "status": draw.pick(_STATES) if draw.chance(0.6) else draw.word(), "count": draw.integer(0, 99), "size": draw.integer(1, 60), "language": draw.name(), "brand": draw.name(), "animal": draw.word(), "team": draw.word(),
        "points": draw.integer(0, 999), "product": draw.word(), "answer": draw.integer(0, 99) if draw.chance(0.5) else draw.word(), "user": draw.word(), "x": draw.integer(0, 99), "y": draw.integer(0, 99), "done": draw.chance(0.5),
        "code": f"{draw.word().upper()[:3]}-{draw.integer(1, 999)}", "weight": draw.integer(1, 200), "type": draw.word(), "result": draw.integer(0, 999), "ok": draw.chance(0.5), "phone": f"+{draw.integer(1, 99)} {draw.integer(100000, 9999999)}",
    }  # fmt: skip


def _record(draw: Draw, names: list[str]) -> list[Entry]:
    able = _able(draw)
    found = []
    for name in names:
        value = (
            able[name]
            if name in able
            else draw.pick(
                (draw.word(), draw.name(), draw.integer(0, 999), draw.integer(0, 99), draw.chance(0.5))
            )
        )
        found.append(Entry(name, value, value if isinstance(value, str) else compact({"v": value})[5:-1]))
    return found


def _chosen(draw: Draw) -> list[Entry]:
    if draw.chance(0.35):
        names = list(
            draw.pick(
                (
                    ("name", "age"),
                    ("name", "age"),
                    ("name", "city"),
                    ("name", "age", "city"),
                    ("name", "email"),
                    ("name", "job"),
                    ("title", "year"),
                    ("product", "price"),
                    ("id", "name"),
                    ("city", "country"),
                    ("name", "price"),
                )
            )
        )
    else:
        names = draw.rng.sample(list(_able(draw)), draw.pick((1, 2, 2, 2, 3, 3, 4)))
        names = [draw.word() if draw.chance(0.25) else name for name in names]
    return _record(draw, list(dict.fromkeys(names)))


def _listed(draw: Draw, names: list[str]) -> str:
    quoted = [f'"{name}"' for name in names] if draw.chance(0.12) else names
    joined = ", ".join(quoted)
    if len(quoted) == 1:
        return quoted[0]
    return str(
        draw.pick(
            (
                joined,
                joined,
                f"{', '.join(quoted[:-1])} and {quoted[-1]}",
                f"{', '.join(quoted[:-1])} and {quoted[-1]}",
                f"{', '.join(quoted[:-1])} & {quoted[-1]}",
                " + ".join(quoted),
                "/".join(quoted),
            )
        )
    )


def _values(draw: Draw, chosen: list[Entry]) -> str:
    shown = [one.shown for one in chosen]
    if [one.key for one in chosen[:2]] == ["name", "age"] and draw.chance(0.5):
        first = draw.phrase(
            (
                "{0} ({1})",
                "{0} aged {1}",
                "{0}, {1} years old",
                "{0}, who is {1}",
                "{0}, aged {1}",
                "{0}, age {1}",
                "{0}, {1}",
                "a person called {0}, aged {1}",
                "{0}, of age {1}",
                "{0}, now {1}",
            )
        ).format(*shown)
        rest = [draw.pick((", from {0}", " from {0}", ", {0}", " in {0}")).format(one) for one in shown[2:]]
        return first + "".join(rest)
    if len(shown) == 1:
        return shown[0]
    joined = ", ".join(shown)
    return str(
        draw.pick(
            (
                joined,
                joined,
                joined,
                joined,
                f"{', '.join(shown[:-1])} and {shown[-1]}",
                f"{', '.join(shown[:-1])} and {shown[-1]}",
                "; ".join(shown),
                " / ".join(shown),
                " | ".join(shown),
            )
        )
    )


def _pairs(draw: Draw, chosen: list[Entry]) -> str:
    if len(chosen) == 1 and draw.chance(0.4):
        return draw.phrase(_SINGLE).format(k=chosen[0].key, v=chosen[0].shown)
    way = draw.pick(
        (
            "{k} {v}",
            "{k} {v}",
            "{k}: {v}",
            "{k}: {v}",
            "{k}={v}",
            "{k} = {v}",
            "{k} is {v}",
            "the {k} is {v}",
            "the {k} {v}",
            "{k} of {v}",
            '{k} "{v}"',
            "{k} -> {v}",
            "a {k} of {v}",
        )
    )
    made = [
        way.replace('"{v}"', "{v}" if not isinstance(one.value, str) else '"{v}"').format(
            k=one.key, v=one.shown
        )
        for one in chosen
    ]
    if way == "{k} {v}" and draw.chance(0.25):
        return " ".join(made)
    if len(made) > 1 and draw.chance(0.4):
        return f"{', '.join(made[:-1])} and {made[-1]}"
    return str(draw.pick((", ", ", ", ", ", "; "))).join(made)


def request(draw: Draw) -> tuple[str, dict[str, Any]]:
    """Returns (the user's message, the object)."""
    kind = draw.rng.random()
    said = ""
    if kind < 0.15:
        names = draw.pick(list(_SAID))
        chosen = _record(draw, list(names))
        said = draw.phrase(_SAID[names]).format(*(one.shown for one in chosen))
        pattern = draw.phrase(_ABOUT)
    else:
        chosen = _chosen(draw)
        pattern = draw.phrase(_APART if kind < 0.6 else _PAIRED)
    names_listed, lead, verb = (
        _listed(draw, [one.key for one in chosen]),
        draw.phrase(_LEADS),
        draw.phrase(_VERBS),
    )
    parts = {
        "k": names_listed, "b": "{" + ", ".join(one.key for one in chosen) + "}", "v": _values(draw, chosen), "p": _pairs(draw, chosen), "j": draw.pick(_JSON), "w": draw.phrase(_WITH), "d": verb, "l": lead, "s": said,
        "n": draw.pick(_NOUNS),
    }  # fmt: skip
    starts = pattern[0] == "{" and pattern[1] in "ldj"
    loose = draw.chance(0.2)
    if loose:
        parts |= {
            "d": verb.lower(),
            "l": lead.lower().replace("i ", "I ", 1) if lead[:2] == "I " else lead.lower(),
        }
    elif not starts:
        parts |= {"l": lead[:1].lower() + lead[1:] if lead[:2] not in ("I ", "I'") else lead}
    asked = " ".join(pattern.format(**parts).split(" ")).strip()
    asked = " ".join(part for part in asked.split(" ") if part)
    if starts and not loose:
        asked = asked[0].upper() + asked[1:]
    asked += (
        draw.pick(("", "", "", ".", "", " please", ", please", "!"))
        if asked[-1].isalnum()
        and not chosen[-1].shown.startswith("http")
        and not asked.endswith(chosen[-1].shown)
        else ""
    )
    return asked, {one.key: one.value for one in chosen}
