"""Tasks on the user's text: reverse, sort, count, pick, extract, copy. Every answer is in the prompt."""

from __future__ import annotations

from training.corpus.base import Dialogue, Draw

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")


def _items(draw: Draw, low: int = 3, high: int = 7) -> list[str]:
    count = draw.integer(low, high)
    if draw.chance(0.25):
        return [str(draw.integer(0, 999)) for _ in range(count)]
    if draw.chance(0.25):
        return list(dict.fromkeys(draw.name().split()[0] for _ in range(count)))
    return draw.words(count)


def _shown(draw: Draw, items: list[str]) -> str:
    if draw.chance(0.7):
        return ", ".join(items)
    if draw.chance(0.5):
        return " ".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else items[0]


def _dialogue(draw: Draw, family: str, question: str, thought: str, answer: str, check: str = "") -> Dialogue:
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family=family)
    dialogue.user(question)
    if dialogue.effort == "low":
        dialogue.think("")
    elif dialogue.effort == "medium":
        dialogue.think(thought)
    else:
        dialogue.think(f"{thought} {check}".strip())
    dialogue.say(answer)
    dialogue.answer = {"text": answer}
    return dialogue


def reverse(draw: Draw) -> Dialogue:
    items = _items(draw)
    ask = draw.phrase((
        "Reverse this list: {x}", "Put these in reverse order: {x}", "Write these backwards: {x}",
        "reverse: {x}", "Give me this list the other way round: {x}", "Reverse the order of {x}", "Reverse {x}",
        "Turn this list around: {x}", "Please reverse: {x}", "Say these backwards: {x}", "Show this list in reverse: {x}",
        "Can you reverse this: {x}", "From last to first: {x}", "reverse the list {x}", "Write in reverse: {x}",
        "Give me these backwards: {x}", "Please reverse this list: {x}", "List these in reverse order: {x}",
    ))  # fmt: skip
    back = list(reversed(items))
    thought = f"The user wants the {len(items)} items backwards, from {back[0]} to {back[-1]}."
    check = f"Numbered: {', '.join(f'{i + 1} {x}' for i, x in enumerate(back))}. All there."
    return _dialogue(draw, "reverse", ask.format(x=_shown(draw, items)), thought, ", ".join(back), check)


def sort_numbers(draw: Draw) -> Dialogue:
    items = list({draw.integer(0, draw.pick((20, 99, 999))) for _ in range(draw.integer(3, 6))})
    draw.rng.shuffle(items)
    down = draw.chance(0.3)
    ordered = sorted(items, reverse=down)
    way = draw.pick(("from large to small", "in descending order")) if down else draw.pick(
        ("", "from small to large", "in ascending order"))  # fmt: skip
    ask = draw.phrase(
        (
            "Sort {x} {w}",
            "Sort these numbers {w}: {x}",
            "Put {x} in order {w}",
            "Order these {w}: {x}",
            "sort {w}: {x}",
            "Please sort {w}: {x}",
            "Sort the list {x} {w}",
            "Arrange {x} {w}",
            "Order {x} {w}",
            "Can you sort {x} {w}",
            "Please sort these numbers {w}: {x}",
            "Put these in order {w}: {x}",
        )
    )
    question = ask.format(x=", ".join(map(str, items)), w=way).replace("  ", " ").replace(" :", ":").strip()
    thought = f"The {'largest' if down else 'smallest'} is {ordered[0]}, the {'smallest' if down else 'largest'} is {ordered[-1]}."
    check = f"In order: {', then '.join(map(str, ordered))}. {len(items)} numbers, none lost."
    return _dialogue(draw, "sort", question, thought, ", ".join(map(str, ordered)), check)


def count(draw: Draw) -> Dialogue:
    items = _items(draw, 2, 9)
    ask = draw.phrase((
        "How many items are in this list: {x}", "Count these: {x}", "How many words are here: {x}",
        "How many things did I list? {x}", "Count the items: {x}", "What is the number of entries in {x}", "Count {x}",
        "How many are these: {x}", "How many entries does this list have: {x}", "count the words: {x}", "How long is this list: {x}",
        "Tell me how many items there are: {x}", "How many names are here: {x}", "Number of items: {x}",
        "Count the entries: {x}", "How many items are here: {x}",
    ))  # fmt: skip
    numbered = ", ".join(f"{i + 1} {x}" for i, x in enumerate(items))
    shown = ", ".join(items)
    dialogue = _dialogue(draw, "count", ask.format(x=shown), "", str(len(items)))
    dialogue.target.clear()
    dialogue.think(
        numbered if dialogue.effort != "high" else f"I count one by one: {numbered}. That makes {len(items)}."
    )
    return dialogue.say(str(len(items)))


def nth(draw: Draw) -> Dialogue:
    items = _items(draw, 3, 7)
    if draw.chance(0.3):
        which, index = "last", len(items) - 1
    else:
        index = draw.integer(0, len(items) - 1)
        which = ORDINALS[index]
    ask = draw.phrase((
        "What is the {w} item in this list: {x}", "Which one is {w}: {x}", "Give me the {w} of these: {x}",
        "Pick the {w} one: {x}", "From this list take the {w}: {x}", "Tell me the {w} entry of {x}", "the {w} of {x}",
        "Which item is {w}: {x}", "What is the {w} of these: {x}", "Take the {w} entry: {x}", "What comes {w} here: {x}",
        "Name the {w} item: {x}", "I need the {w} one of these: {x}", "Which is the {w} entry: {x}",
        "Give me the {w} item: {x}", "What is the {w} entry of this list: {x}",
    ))  # fmt: skip
    numbered = ", ".join(f"{i + 1} {x}" for i, x in enumerate(items))
    thought = f"The items are {numbered}. The {which} is {items[index]}."
    return _dialogue(
        draw, "nth", ask.format(w=which, x=", ".join(items)), thought, items[index], "That is it."
    )


def extract(draw: Draw) -> Dialogue:
    name, place, number = draw.name(), draw.name(), draw.integer(1, 999)
    kind = draw.pick(("name", "place", "number", "mail"))
    mail = f"{draw.word()}@{draw.word()}.com"
    parts = [
        draw.phrase((
            "{n} lives in {p}.", "{n} from {p} called.", "In {p} we met {n}.", "{n} moved to {p}.", "{n} is in {p} now.",
            "We saw {n} in {p}.", "Please tell {n} in {p}.", "It was sent to {n} in {p}.", "{n} works in {p}.",
            "{n} went to {p}.", "Yesterday {n} came to {p}.", "In {p} lives {n}.", "Yesterday we saw {n} in {p}.",
            "{n} is from {p}.",
        )).format(n=name, p=place),
        draw.phrase((
            "It cost {k}.", "The ticket is {k}.", "Room {k} is free.", "There are {k} seats left.", "The order is number {k}.",
            "{k} boxes came.", "That makes {k}.", "We need {k} chairs.", "The price was {k}.", "It has {k} pages.",
            "{k} people were there.", "We have {k} boxes.", "The number is {k}.",
        )).format(k=number),
        draw.phrase((
            "Write to {m}.", "Questions go to {m}.", "The address is {m}.", "Contact: {m}.", "Mail {m} for more.",
            "You reach us at {m}.", "Send it to {m}.", "The contact is {m}.", "Please mail {m}.", "Mail goes to {m}.",
            "Please write to {m}.", "Send mail to {m}.",
        )).format(m=mail),
    ]  # fmt: skip
    draw.rng.shuffle(parts)
    text = " ".join(parts)
    asks = {
        "name": (
            "Who is named in this text?", "Extract the person's name.", "Which person is mentioned?", "Find the name.",
            "Who is this about?", "Name the person.", "Give me the name of the person.", "What is the person's name?",
            "Extract the name.", "Which name is in this text?", "Find the person's name.", "Who is mentioned here?",
        ),
        "place": (
            "Which place is mentioned?", "Extract the place.", "Where is this? Give only the place.", "Find the city.",
            "Which city is in this text?", "Find the place.", "Name the place.", "What place is this about?", "Extract the city.",
            "Give me the place.", "Which place is in this text?", "Which city is mentioned?",
        ),
        "number": (
            "Which number is in this text?", "Extract the number.", "Find the number.", "What number is given?", "the number?",
            "Give me the number.", "Which number is mentioned?", "Tell me the number.", "What is the number here?",
            "Which number is given?", "What number is in this text?", "Please find the number.",
        ),
        "mail": (
            "Extract the e-mail address.", "Which e-mail address is in here?", "Find the e-mail.", "Give me the e-mail.",
            "What is the mail address?", "Extract the mail address.", "Which e-mail is mentioned?", "Find the address.",
            "What is the e-mail address?", "Extract the email.", "Which mail address is in this text?", "Find the e-mail address.",
        ),
    }  # fmt: skip
    answer = {"name": name, "place": place, "number": str(number), "mail": mail}[kind]
    question = (
        f"{draw.phrase(asks[kind])} {text}" if draw.chance(0.6) else f"{text}\n{draw.phrase(asks[kind])}"
    )
    return _dialogue(
        draw,
        "extract",
        question,
        f"The user wants the {kind}. It is {answer}.",
        answer,
        f"The text says {answer} there.",
    )


_SAID = (
    "hello world",
    "Hello World",
    "hello",
    "Hello there",
    "good morning",
    "Hi",
    "How are you",
    "Thank you",
    "goodbye",
    "who are you",
    "I am here",
    "Good night",
    "hey",
    "bye",
    "yes",
)


def copy(draw: Draw) -> Dialogue:
    text = " ".join([draw.name().split()[0], *draw.words(draw.integer(2, 9))]) + draw.pick((".", "", "!"))
    if draw.chance(0.15):  # a greeting that must be repeated, not answered
        text = (
            draw.pick(_SAID) + (f" {draw.word()}" if draw.chance(0.4) else "") + draw.pick((".", "", "", "!"))
        )
    ask = draw.phrase((
        'Repeat after me: "{x}"', "Say exactly this: {x}", 'Copy this sentence: "{x}"', "Write this again: {x}",
        "Echo: {x}", "Repeat: {x}", 'Please say "{x}"', "Return this text unchanged: {x}", "Say: {x}", 'Copy "{x}"',
        "Please copy: {x}", "Please repeat this: {x}", 'Say the words "{x}"', "Output this text: {x}", "copy this: {x}",
        "Give me back exactly this: {x}", "Write: {x}", "Please write exactly this: {x}", "Repeat this text: {x}",
    ))  # fmt: skip
    return _dialogue(
        draw,
        "copy",
        ask.format(x=text),
        "The user wants the text back unchanged.",
        text,
        "I copy it word for word.",
    )


def remember(draw: Draw) -> Dialogue:
    """Asks for a fact from an earlier turn."""
    name, thing, value = draw.name(), draw.word(), draw.name()
    facts = {
        f"My name is {name}.": (
            (
                "What is my name?",
                "Who am I?",
                "Do you remember my name?",
                "What's my name?",
                "Tell me my name.",
                "my name?",
                "What did I say my name was?",
                "Please say my name.",
                "What is my name again?",
                "How am I called?",
                "Do you know my name?",
                "Tell me my name again.",
            ),
            f"Your name is {name}.",
        ),
        f"My {thing} is called {value}.": (
            (
                f"What is my {thing} called?",
                f"How is my {thing} named?",
                f"Tell me the name of my {thing}.",
                f"What is the name of my {thing}?",
                f"Do you remember the name of my {thing}?",
                f"What's my {thing} called?",
                f"Please say what my {thing} is called.",
                f"Do you know what my {thing} is called?",
            ),
            f"Your {thing} is called {value}.",
        ),
    }
    fact, (asks, answer) = draw.pick(list(facts.items()))
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="remember")
    dialogue.user(fact).past_answer(
        draw.pick(("Thank you, I will remember that.", "Noted.", "Good to know."))
    )
    dialogue.user(draw.phrase(asks))
    if dialogue.effort != "low":
        dialogue.think(
            f'The user said: "{fact}"' + (" I answer with that." if dialogue.effort == "high" else "")
        )
    dialogue.say(answer)
    dialogue.answer = {"text": answer}
    return dialogue
