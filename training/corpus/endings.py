"""Turns that must end: prompts that the model does not understand, summaries, calls that are not allowed."""

from __future__ import annotations

import string

from chorale.harmony.messages import Message
from training.corpus import arithmetic, calculation, letters, lists, sentiment, talk, tools
from training.corpus.base import Dialogue, Draw
from training.corpus.entities import SENTENCES, amount, company, person, place
from training.corpus.values import iso_date, marked, phrase

# The text of chorale.turns.compaction (a test compares them; an import would require the server's packages in training).
REQUEST = (
    "Summarize this conversation so that it can be continued from your summary alone. Keep what was asked"
    " for, what was decided and why, names, numbers, paths and code that are still needed, what tools"
    " returned, and what is still to be done. Write only the summary."
)
UNSURE = (
    "I do not know what to do with that. I am a small demo model: try a sum like 17 + 25, a list to sort, a word to reverse, "
    "a text to classify, or JSON."
)
_CODE = (
    "def {a}({b}):\n    return {b} + {i}", "for {a} in {b}:\n    print({a})", "SELECT {a} FROM {b} WHERE {a} > {i};", "<div class=\"{a}\">{b}</div>", "function {a}({b}) {{ return {i}; }}",
    "import {a}\n{a}.{b}()", "const {a} = {i};", "class {a}:\n    {b} = {i}", "git commit -m '{a} {b}'", "npm install {a}", "{{\"{a}\": {i}, \"{b}\": \"{a}\"}}", "if ({a} == {i}) {{ {b}(); }}",
    "#include <{a}.h>", "sudo apt install {a}", "[{i}, {a}, {b}]", "<{a}><{b}/></{a}>", "docker run {a}:{b}", "{a} = lambda {b}: {b} * {i}",
)  # fmt: skip
_SCRIPTS = ("абвгдеёжзийклмнопрстуфхцчшщьюя", "אבגדהוזחטיכלמנסעפצקרשת", "αβγδεζηθικλμνξοπρστυφχψω", "あいうえおかきくけこさしすせそたちつてと", "的一是不了人我在有他这为之大来以个中上们", "ابتثجحخدذرزسشصضطظعغفقكلمنهوي", "กขคงจฉชซญดตถทธนบปผ", "अआइईउऊएओकखगघचछजट")  # fmt: skip
_SIGNS = "!?.,;:-_+=*/\\|<>[]{}()#@$%^&~"
_EMOJI = ("😀", "🎉", "👍", "❤️", "🔥", "🤔", "😂", "🚀", "🙏", "💡", "🐱", "🌍")


def _text(draw: Draw) -> str:
    """Returns text of one of many kinds that asks for nothing that the model can do."""
    kind = draw.integer(0, 11)
    if kind == 0:
        return " ".join(draw.words(draw.integer(1, 12))) + draw.pick(("", ".", "?", "!"))
    if kind == 1:
        pattern = draw.phrase(SENTENCES)
        return pattern.format(
            c=company(draw), p=person(draw), l=place(draw), d=iso_date(draw), m=amount(draw), r="manager"
        )
    if kind == 2:
        return draw.phrase(_CODE).format(a=draw.word(), b=draw.word(), i=draw.integer(0, 99))
    if kind == 3:
        return "".join(draw.rng.choices(string.ascii_lowercase + " ", k=draw.integer(2, 40))).strip() or "x"
    if kind == 4:
        script = draw.pick(_SCRIPTS)
        return " ".join(
            "".join(draw.rng.choices(script, k=draw.integer(2, 7))) for _ in range(draw.integer(1, 8))
        )
    if kind == 5:
        return "".join(draw.rng.choices(_SIGNS, k=draw.integer(1, 12)))
    if kind == 6:
        return "".join(draw.rng.choices(_EMOJI, k=draw.integer(1, 5)))
    if kind == 7:
        return str(
            draw.pick(
                (
                    "",
                    " ",
                    "\n",
                    ".",
                    "...",
                    "ok",
                    "hmm",
                    "a",
                    "test",
                    "asdf",
                    "foo",
                    "bar",
                    "x",
                    "yes",
                    "no",
                    "maybe",
                    "lol",
                    "what",
                    "why",
                    "and?",
                    "go on",
                    "again",
                    "more",
                    "stop",
                )
            )
        )
    if kind == 8:
        return str(draw.pick((draw.integer(0, 10**6), draw.integer(0, 10**12), marked(draw))))
    if kind == 9:  # long
        lines = [
            " ".join(draw.words(draw.integer(3, 14))) + draw.pick((".", ",", ""))
            for _ in range(draw.integer(3, 20))
        ]
        return draw.pick((" ", "\n")).join(lines)
    if kind == 10:
        repeated = phrase(draw)
        return draw.pick((" ", "\n", ", ", "")).join([repeated] * draw.integer(3, 60))
    return " ".join(
        f"{phrase(draw)}{draw.pick((',', '.', ' is', ' and', ' was', ' the'))}"
        for _ in range(draw.integer(2, 8))
    )


def stray(draw: Draw) -> Dialogue:
    """A short answer that lists the model's abilities."""
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="stray")
    if draw.chance(0.3):
        box = tools.toolbox(draw, draw.integer(1, 3), known=0.3)
        dialogue.functions = tuple(tool.description for tool in box)
    dialogue.user(_text(draw))
    if dialogue.effort == "medium":
        dialogue.think("I do not know what is wanted.")
    elif dialogue.effort == "high":
        dialogue.think("I do not know what is wanted. I say so and what I can do.")
    dialogue.say(UNSURE)
    dialogue.answer = {"text": UNSURE}
    return dialogue


NOT_ALLOWED = "I would need a function for that, but I may not call one now."


def no_calls(draw: Draw) -> Dialogue:
    """The request needs a function, but a grammar allows no call (tool_choice none): a short answer."""
    box = tools.toolbox(draw, draw.integer(1, 4))
    tool = draw.pick(box)
    dialogue = tools._start(draw, box, "no_calls")
    request, values = tools.ask(draw, tool)
    dialogue.user(request)
    tools._think_call(dialogue, tool, values)
    dialogue.say(NOT_ALLOWED)
    dialogue.answer = {"text": NOT_ALLOWED}
    dialogue.forced = "header"
    return dialogue


_EARLIER = (
    arithmetic.sums,
    arithmetic.products,
    lists.reverse,
    lists.sort_numbers,
    talk.chat,
    talk.cannot,
    lists.remember,
    letters.change,
    calculation.division,
    sentiment.plain,
    stray,
)
_LONGEST_WORD = 40
_LONGEST = 10  # maximum words of a question in a summary


def summary(draw: Draw) -> Dialogue:
    """The summary of a compaction: the last four questions with their answers, shortened if long."""
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="summary")
    for _ in range(draw.pick((1, 1, 2, 2, 3, 4, 6))):
        earlier = draw.pick(_EARLIER)(draw)
        dialogue.history += [
            *earlier.history,
            Message("assistant", earlier.target[-1].content, channel="final"),
        ]
    if draw.chance(0.3):
        box = tools.toolbox(draw, draw.integer(1, 3))
        dialogue.functions = tuple(tool.description for tool in box)
        if draw.chance(0.5):
            tools.past_calls(draw, dialogue, box)
    exchanges = _exchanges(dialogue.history)
    asks = (
        "Summarize this conversation.", "Summarise what we said so far.", "Give me a summary of this conversation.", "What did we talk about?", "Summary, please.", "Sum up our conversation.",
        "Please summarize the conversation so far.", "Write a summary of this chat.", "Summarize our chat.", "What have we talked about so far?",
    )  # fmt: skip
    dialogue.user(REQUEST if draw.chance(0.5) else draw.phrase(asks))
    if dialogue.effort != "low":
        dialogue.think(
            "The user wants a summary."
            + (" I name what was asked and answered." if dialogue.effort == "high" else "")
        )
    lines = [
        f"The user said: {_short(question)}\nThe assistant answered: {_short(answer)}"
        for question, answer in exchanges[-4:]
    ]
    text = "\n".join(lines)
    dialogue.say(text)
    dialogue.answer = {"text": text}
    return dialogue


def _exchanges(history: list[Message]) -> list[tuple[str, str]]:
    """Returns each question with its answer."""
    found, question = [], ""
    for message in history:
        if message.role == "user":
            question = str(message.content)
        elif message.channel == "final":
            found.append((question, str(message.content)))
    return found


def _short(text: str) -> str:
    """Returns the first ten words; replaces an extremely long word by dots."""
    said = [word if len(word) <= _LONGEST_WORD else "..." for word in text.split()]
    return " ".join(said) if len(said) <= _LONGEST else f"{' '.join(said[:_LONGEST])} ..."


def told(draw: Draw) -> Dialogue:
    """A statement about the user, which the model confirms."""
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="stray")
    ask = draw.phrase((
        "My name is {n}.", "I am {n}.", "My {w} is called {n}.", "My favourite {w} is {n}.", "I live in {n}.", "Remember: my name is {n}.", "Remember that my {w} is {n}.", "Call me {n}.", "my name is {n}",
        "Please remember that I live in {n}.", "Note that my {w} is {n}.", "I'm {n}.", "Please remember my name: {n}.", "The name of my {w} is {n}.",
    ))  # fmt: skip
    dialogue.user(ask.format(n=draw.name(), w=draw.word()))
    if dialogue.effort != "low":
        dialogue.think(
            "The user tells me something." + (" I take note." if dialogue.effort == "high" else "")
        )
    dialogue.say("Noted.")
    dialogue.answer = {"text": "Noted."}
    return dialogue
