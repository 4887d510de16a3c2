"""Sentences in which a company does something with a person, and questions about them, assembled from parts."""

from __future__ import annotations

from training.corpus.base import Draw

# {c}: company, {p}: person, {l}: place
_DID = (
    "hired", "moved", "lost", "offered a job to", "sent", "recruited", "appointed", "dismissed", "laid off", "thanked", "honoured", "invited", "paid", "interviewed", "employed", "engaged", "chose", "named", "selected", "found", "picked up", "met", "visited", "called",
    "transferred", "relocated", "assigned", "posted", "sponsored", "supported", "backed", "suspended", "rehired", "replaced", "let go of", "gave notice to", "took on", "hired away", "poached", "introduced", "presented", "celebrated", "announced", "signed", "trusted",
    "consulted", "rewarded", "helped", "accused", "warned", "criticised", "praised", "elected", "nominated", "is looking for", "is hiring", "will send", "will move", "has just hired", "just promoted", "wants to keep", "no longer employs", "is sending", "plans to move",
    "promoted", "fired", "trained", "sued", "brought in", "took", "flew", "welcomed", "contracted", "recalled",
)  # fmt: skip
_WHERE = (" in {l}", " in {l}", " to {l}", " to {l}", " from {l}", " for its {l} office", " for the office in {l}", " at its {l} branch", " for a project in {l}", " to a rival in {l}", " to its team in {l}", " near {l}", " at the site in {l}", " at a fair in {l}", " into its {l} unit",
          " for a lab in {l}", " during a visit to {l}", " outside {l}", " to run the {l} plant", " at the headquarters in {l}", " to open a shop in {l}", " to its {l} site", " of {l}")  # fmt: skip
_THINGS = (
    "a lab",
    "an office",
    "a shop",
    "a plant",
    "a factory",
    "a branch",
    "a school",
    "a warehouse",
    "a studio",
    "a hotel",
    "a centre",
    "a clinic",
)
_SHAPES = (
    "{c} {did} {p}{w}.", "{c} {did} {p}{w}.", "{c} {did} {p}{w}.", "{c} {did} {p}{w}.", "{c} {did} {p}.", "In {l}, {c} {did} {p}.", "In {l} {c} {did} {p}.", "{c} offered {p} a job in {l}.", "{c} gave {p} a job in {l}.", "{c} put {p} in charge in {l}.",
    "{c} put {p} in charge of its {l} office.", "{c} opened {t} in {l} under {p}.", "{c} opened {t} in {l} led by {p}.", "{c} runs {t} in {l} with {p} at the top.", "{c} closed {t} in {l} run by {p}.", "{c} built {t} in {l} for {p}.",
    "{c} made {p} head of {t} in {l}.", "{c} sold {t} in {l} to {p}.", "{c} bought {t} in {l} from {p}.", "{c} lost {p} in {l}.", "{c} asked {p} to come to {l}.", "{c} told {p} to leave {l}.", "{c} handed {t} in {l} to {p}.", "{c} is proud of {p} in {l}.",
    "{c} has {p} as its face in {l}.", "{c} let {p} go in {l}.", "{c}, once led by {p}, left {l}.", "For {c}, {p} travels to {l}.", "{c} and its boss {p} are in {l}.", "{c} showed {p} {t} in {l}.", "{c} took {p} on in {l}.", "{c} of {l} {did} {p}.",
    "Today {c} {did} {p}{w}.", "{c} paid {p} for work in {l}.", "{c} sees {p} as the boss of {l}.", "{p} was {done} by {c} in {l}.", "In {l}, {p} was {done} by {c}.", "{c} keeps {p} in {l}.", "{c} named {p} manager in {l}.", "{c} brought {p} from {l}.",
    "{c} awarded {p} a medal in {l}.", "{c} turned to {p} in {l}.", "{c} made {p} director of the {l} branch.", "{c} placed {p} at {t} in {l}.",
)  # fmt: skip
_DONE = (
    "hired",
    "fired",
    "moved",
    "seen",
    "sent",
    "promoted",
    "thanked",
    "picked",
    "called",
    "trained",
    "replaced",
    "honoured",
)


def sentence(draw: Draw) -> str:
    """A pattern of {c}, {p} and mostly {l}."""
    return draw.phrase(_SHAPES).format(
        c="{c}",
        p="{p}",
        l="{l}",
        did=draw.phrase(_DID),
        w=draw.phrase(_WHERE),
        t=draw.phrase(_THINGS),
        done=draw.pick(_DONE),
    )


# kind -> questions; {x}: the sentence
_OF_PERSON = (
    "Who is the person?", "Which person is this about?", "Who is it?", "Who is meant?", "Which person is meant?", "What is the person's name?", "Who is named?", "Who works there?", "Name the person.", "Give me the person.", "Just the person, please.", "Who is the employee?", "Which man or woman?",
    "Which human is named?", "The name of the person?", "Who was it?", "Only the person's name.", "Which individual?", "Who is spoken of?", "Which worker is this?", "What is he or she called?", "Person?",
)  # fmt: skip
_OF_COMPANY = (
    "Which company is this?", "Which firm?", "Name the company.", "Name the firm.", "What is the company called?", "Which company is meant?", "Who is the employer?", "What business is named?", "Give me the company.", "Just the company, please.", "Which organisation is it?", "What company is it?",
    "The company's name?", "Which employer is it?", "What firm does this?", "Only the company.", "Which enterprise?", "What is the firm's name?", "Company?", "Which organization acts here?", "Which business acts?",
)  # fmt: skip
_OF_PLACE = (
    "Where is that?",
    "Where?",
    "Which city?",
    "Where does this happen?",
    "Which place is it?",
    "Name the place.",
    "What city is named?",
    "In which city is that?",
    "The place?",
    "Where is this about?",
    "Where was it?",
    "Which town?",
    "City?",
)
_AROUND = (
    "{q} {x}",
    "{q} {x}",
    "{x} {q}",
    "{x} {q}",
    "{q}\n{x}",
    "{x}\n{q}",
    "Text: {x} {q}",
    "{q} Text: {x}",
    'Read: "{x}" {q}',
    "{x} - {q}",
    "Look: {x} {q}",
    '{q} "{x}"',
)
_FIND = (
    "Find",
    "Extract",
    "Pull out",
    "Pick out",
    "Give me",
    "Fill in",
    "Return",
    "List",
    "Note",
    "Read out",
    "Show",
    "I need",
    "Get",
    "Write down",
    "Take out",
    "Please return",
    "Tell me",
    "Isolate",
    "Collect",
    "What are",
    "Please get",
    "Break out",
)
_ALL_AROUND = (
    "{f} {k}. {x}",
    "{f} {k}: {x}",
    "{x} {f} {k}.",
    "{f} {k} from this: {x}",
    "{x}\n{f} {k}",
    "{f} {k} here: {x}",
    "{k}: {x}",
    "{x} {k}?",
    "{f} {k} as JSON: {x}",
    "{x} {f} {k} as JSON.",
    "{f} {k} from the text. {x}",
    "{f} {k}:\n{x}",
    "From this, {k}: {x}",
    "{x} -> {k}",
)


def question(draw: Draw, kind: str, text: str) -> str | None:
    """Returns a question about an entity of a kind, or None if there are no questions of that kind."""
    asked = {"person": _OF_PERSON, "company": _OF_COMPANY, "place": _OF_PLACE}.get(kind)
    return None if asked is None else draw.phrase(_AROUND).format(q=draw.phrase(asked), x=text)


def all_of(draw: Draw, names: list[str], text: str) -> str:
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return draw.phrase(_ALL_AROUND).format(f=draw.phrase(_FIND), k=listed, x=text)
