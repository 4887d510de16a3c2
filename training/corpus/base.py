"""What every family of the corpus is made of: word pools split by hash, dialogues, and their token form.

Held-out means disjoint: a word belongs to the evaluation pool if its hash says so, and training never draws
it; families keep some phrasings and number pairs for evaluation in the same way.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from chorale.harmony.messages import (
    Conversation,
    DeveloperContent,
    Message,
    ReasoningEffort,
    ResponseFormat,
    SystemContent,
    ToolDescription,
    ToolNamespace,
)
from chorale.harmony.render import render_conversation, render_message
from chorale.harmony.vocab import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    Vocabulary,
    load_vocabulary,
)

Split = Literal["train", "eval"]
ASSISTANT = 173781


def held_out(text: str, share: int = 12) -> bool:
    """Whether one in ``share`` falls to the evaluation pool: FNV-1a of the text."""
    key = 0xCBF29CE484222325
    for byte in text.encode():
        key = ((key ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return (key >> 20) % share == 0


@functools.cache
def vocabulary() -> Vocabulary:
    return load_vocabulary()


# Words that hold one of these are in no pool: a demo should not say them at random.
_UNFIT = (
    "fuck", "shit", "cunt", "nigg", "fag", "rape", "porn", "sex", "slut", "whore", "bitch", "dick", "cock", "puss",
    "anal", "anus", "tits", "boob", "nude", "naked", "milf", "nazi", "hitler", "kill", "murder", "suicid", "terror",
    "bomb", "slave", "penis", "vagin", "erot", "fetish", "orgas", "masturb", "jihad", "negro", "retard", "bastard",
    "piss", "crap", "dildo", "incest", "molest", "pedo", "escort", "hooker", "blowjob", "cum", "jerk", "dead", "die",
)  # fmt: skip


# Words that would be held out but that phrasings of the training corpus use: those train.
_TEMPLATE_WORDS = frozenset(
    """
    address best bin calculator called chem copy currency departure echo enum facts
    func honestly humidity important items kwa lau let mean nice num nung
    ond pos price prints quantity que qui repeat required response returned save
    send should ste sum tall tweet use valid venue visible year
    """.split()  # noqa: SIM905
)


def _fit(word: str) -> bool:
    return not any(part in word.lower() for part in _UNFIT)


_STARTS = (
    "b",
    "br",
    "c",
    "ch",
    "d",
    "dr",
    "f",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "kl",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
    "",
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ei", "ou", "ia", "io", "ee")
_ENDS = ("", "", "n", "r", "l", "s", "t", "m", "nd", "rk", "x", "ng", "sh")


def made_up(rng: random.Random) -> str:
    """A word of two or three syllables, which is several tokens as a rule."""
    count = rng.choice((2, 2, 3))
    syllables = [
        rng.choice(_STARTS) + rng.choice(_VOWELS) + (rng.choice(_ENDS) if rng.random() < 0.5 else "")
        for _ in range(count)
    ]
    return "".join(syllables)


@functools.cache
def words(split: Split, title: bool = False) -> tuple[str, ...]:
    """Words of 3 to 10 letters that are one token with and without a leading space."""
    vocab = vocabulary()
    tokens = [vocab.token_bytes(i) for i in range(199998)]
    known = set(tokens)
    found = []
    for token in tokens:
        word = token[1:]
        if token[:1] != b" " or word not in known or not 3 <= len(word) <= 10:
            continue
        text = word.decode("latin-1")
        if text.isascii() and text.isalpha() and (text.istitle() if title else text.islower()):
            found.append(text)
    return tuple(
        w
        for w in found
        if _fit(w) and (held_out(w.lower()) and w.lower() not in _TEMPLATE_WORDS) == (split == "eval")
    )


@dataclass(slots=True)
class Draw:
    """A seeded source of everything random in one dialogue."""

    rng: random.Random
    split: Split

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.rng.randrange(len(options))]

    def phrase(self, options: Sequence[str]) -> str:
        """One of several phrasings; one in five of them is kept for evaluation (at least the others train)."""
        if len(options) < 4:
            return str(self.pick(options))
        kept = max(1, len(options) // 6)
        pool = options[-kept:] if self.split == "eval" else options[:-kept]
        return str(self.pick(pool))

    def word(self) -> str:
        if self.rng.random() < 0.25:
            return self._made_up()
        return str(self.pick(words(self.split)))

    def _made_up(self) -> str:
        while True:
            word = made_up(self.rng)
            if _fit(word) and held_out(word) == (self.split == "eval"):
                return word

    def words(self, count: int) -> list[str]:
        """Distinct words."""
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            chosen[self.word()] = None
        return list(chosen)

    def name(self) -> str:
        """A capitalised name of one or two words."""
        first = str(self.pick(words(self.split, title=True)))
        if self.rng.random() < 0.25:
            first = self._made_up().capitalize()
        if self.rng.random() < 0.25:
            return f"{first} {self.pick(words(self.split, title=True))}"
        return first

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def integer(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)


@dataclass(slots=True)
class Dialogue:
    """One example: what the model is given, and what it must say (``target``, tool results in between)."""

    draw: Draw
    effort: ReasoningEffort = "medium"
    instructions: str | None = None
    functions: tuple[ToolDescription, ...] = ()
    builtins: tuple[ToolNamespace, ...] = ()
    formats: tuple[ResponseFormat, ...] = ()
    history: list[Message] = field(default_factory=list)
    target: list[Message] = field(default_factory=list)
    family: str = ""
    answer: dict[str, Any] = field(default_factory=dict)  # what an evaluation checks

    # ------------------------------------------------------------------ building

    def user(self, text: str) -> Dialogue:
        self.history.append(Message("user", text))
        return self

    def past_answer(self, text: str) -> Dialogue:
        self.history.append(Message("assistant", text, channel="final"))
        return self

    def think(self, text: str) -> Dialogue:
        if text:
            self.target.append(Message("assistant", text, channel="analysis"))
        return self

    def say(self, text: str) -> Dialogue:
        self.target.append(Message("assistant", text, channel="final"))
        return self

    def preamble(self, text: str) -> Dialogue:
        self.target.append(Message("assistant", text, channel="commentary"))
        return self

    def call(self, name: str, arguments: str) -> Dialogue:
        self.target.append(
            Message(
                "assistant",
                arguments,
                recipient=f"functions.{name}",
                channel="commentary",
                content_type="<|constrain|>json",
            )
        )
        return self

    def call_builtin(self, recipient: str, body: str) -> Dialogue:
        self.target.append(
            Message("assistant", body, recipient=recipient, channel="analysis", content_type="code")
        )
        return self

    def result(self, name: str, text: str, channel: str = "commentary") -> Dialogue:
        self.target.append(Message("tool", text, name=name, recipient="assistant", channel=channel))
        return self

    # ------------------------------------------------------------------ tokens

    def prompt(self) -> list[int]:
        """Everything up to the point where the model begins, without ``<|start|>assistant``."""
        messages = [Message("system", self._system())]
        if self.instructions is not None or self.functions or self.formats:
            messages.append(Message("developer", self._developer()))
        conversation = Conversation((*messages, *self.history))
        return render_conversation(conversation, vocabulary(), for_completion=False)

    def _system(self) -> SystemContent:
        rng = self.draw.rng
        date = f"202{rng.randint(4, 9)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        return SystemContent(current_date=date, reasoning_effort=self.effort, namespaces=self.builtins)

    def _developer(self) -> DeveloperContent:
        namespaces = (ToolNamespace("functions", None, self.functions),) if self.functions else ()
        return DeveloperContent(self.instructions, namespaces, self.formats)

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids [N] int32, learn [N] bool): ``learn`` marks what the model itself must produce."""
        ids = self.prompt()
        learn = [False] * len(ids)
        after_model = False
        for index, message in enumerate(self.target):
            if message.role == "tool":
                piece = render_message(message, vocabulary(), has_functions=bool(self.functions))
                ids += piece
                learn += [False] * len(piece)
                after_model = False
                continue
            ids += [START, ASSISTANT]
            learn += [after_model] * 2
            piece = emitted(message, last=index == len(self.target) - 1)
            ids += piece
            learn += [True] * len(piece)
            after_model = True
        return np.asarray(ids, np.int32), np.asarray(learn, np.bool_)


def emitted(message: Message, last: bool) -> list[int]:
    """A model message in the order in which the model writes it, after ``<|start|>assistant``."""
    encode = vocabulary().encode
    assert isinstance(message.content, str)
    ids = [CHANNEL, *encode(message.channel or "final")]
    if message.recipient is not None:
        ids += encode(f" to={message.recipient}")
    if message.content_type is not None:
        kind = message.content_type.removeprefix("<|constrain|>")
        ids += (
            [*encode(" "), CONSTRAIN, *encode(kind)] if kind != message.content_type else encode(f" {kind}")
        )
    ids += [MESSAGE, *encode(message.content)]
    if message.recipient is not None:
        return [*ids, CALL]
    return [*ids, RETURN if last and message.channel == "final" else END]
