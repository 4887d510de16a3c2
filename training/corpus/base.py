"""The base of all families of the corpus: a source of words and phrasings, dialogues, and their tokens.

There are three splits: "train" and two held-out ones. The goals were set on "eval"; "hard" has more phrasings,
and words that consist of other tokens if no space precedes them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from chorale.harmony.messages import (
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
)
from training.corpus.respell import Given
from training.corpus.words import (
    LETTERS,
    SUFFIXES,
    Split,
    fit,
    held_out,
    pieces,
    syllables,
    vocabulary,
    words,
)

ASSISTANT = 173781


@dataclass(frozen=True, slots=True)
class Phrases:
    """Phrasings for training, and others for evaluations only: ``held`` for both, ``more`` for "hard".

    A list without phrasings for the split is not used.
    """

    train: tuple[str, ...]
    held: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    def of(self, split: Split) -> tuple[str, ...]:
        """Returns the phrasings from which a split draws."""
        return {"train": self.train, "eval": self.held, "hard": self.held + self.more}[split]


_NAMED_AFTER = ("{0}'s", "{0}'s", "O'{0}", "St. {0}", "New {0}", "{0} City", "The {0}", "Dr. {0}", "{0} & Co", "{0} Inc.", "Café {0}", "San {0}",
                "{0}'s Place", "Hotel {0}", "{0} 2", "El {0}")  # fmt: skip


@dataclass(slots=True)
class Draw:
    """The seeded random source of one dialogue."""

    rng: random.Random
    split: Split

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.rng.randrange(len(options))]

    def phrase(self, options: Sequence[str] | Phrases) -> str:
        """Returns one phrasing; of a plain list of at least four, the last sixth is for evaluation only."""
        if isinstance(options, Phrases):
            return str(self.pick(options.of(self.split)))
        if len(options) < 4:
            return str(self.pick(options))
        kept = max(1, len(options) // 6)
        pool = options[:-kept] if self.split == "train" else options[-kept:]
        return str(self.pick(pool))

    def word(self) -> str:
        which = self.rng.random()
        if which < 0.25:
            return self._made_up()
        return str(self.pick(pieces(self.split) if which < 0.33 else words(self.split)))

    def _made_up(self) -> str:
        while True:
            word = self._invent()
            if fit(word) and len(word) > 2 and held_out(word) == (self.split != "train"):
                return word

    def _invent(self) -> str:
        """Returns syllables, except for "eval" also two joined words, a word with an ending, or random letters."""
        kind = self.rng.random()
        if kind < 0.55 or self.split == "eval":
            return syllables(self.rng)
        if kind < 0.7:
            return str(self.pick(words(self.split)))[:5] + str(self.pick(pieces(self.split)))[:5]
        if kind < 0.87:
            return str(self.pick(words(self.split))) + str(self.pick(SUFFIXES))
        return "".join(self.rng.choices(LETTERS, k=self.rng.randint(3, 6)))

    def words(self, count: int) -> list[str]:
        """Distinct words."""
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            chosen[self.word()] = None
        return list(chosen)

    def name(self) -> str:
        """A capitalised name of one or two words."""
        first = self._one_name()
        if self.split == "train" and self.rng.random() < 0.06:
            return str(self.pick(_NAMED_AFTER)).format(first)
        return f"{first} {self._one_name()}" if self.rng.random() < 0.25 else first

    def _one_name(self) -> str:
        if self.rng.random() < 0.35:
            return self.word().capitalize()
        return str(self.pick(words(self.split, title=True)))

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def integer(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)


@dataclass(slots=True)
class Dialogue:
    """One example: the model's input, and its expected messages (``target``, with tool results in between)."""

    draw: Draw
    effort: ReasoningEffort = "medium"
    instructions: str | None = None
    functions: tuple[ToolDescription, ...] = ()
    builtins: tuple[ToolNamespace, ...] = ()
    formats: tuple[ResponseFormat, ...] = ()
    history: list[Message] = field(default_factory=list)
    target: list[Message] = field(default_factory=list)
    family: str = ""
    answer: dict[str, Any] = field(default_factory=dict)  # the values that an evaluation checks
    letters: tuple[str, ...] = ()  # words that the targets write letter by letter
    # A part that a grammar forces: the start of a JSON object ("brace"), or the header of the answer ("header").
    # It is not learned; the text after it is.
    forced: Literal["", "brace", "header"] = ""

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
        """Returns the prompt, without the final ``<|start|>assistant``."""
        messages = [Message("system", self._system())]
        if self.instructions is not None or self.functions or self.formats:
            messages.append(Message("developer", self._developer()))
        return render_conversation([*messages, *self.history], vocabulary(), for_completion=False)

    def _system(self) -> SystemContent:
        rng = self.draw.rng
        date = f"202{rng.randint(4, 9)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        return SystemContent(current_date=date, reasoning_effort=self.effort, namespaces=self.builtins)

    def _developer(self) -> DeveloperContent:
        namespaces = (ToolNamespace("functions", None, self.functions),) if self.functions else ()
        return DeveloperContent(self.instructions, namespaces, self.formats)

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids [N] int32, learn [N] bool); ``learn`` marks the tokens that the model must produce."""
        ids = self.prompt()
        learn = [False] * len(ids)
        given = Given()
        given.add(ids)
        given.spell(self.letters)
        after_model = False
        for index, message in enumerate(self.target):
            if message.role == "tool":
                piece = render_message(message, vocabulary(), has_functions=bool(self.functions))
                ids += piece
                learn += [False] * len(piece)
                given.add(piece)
                after_model = False
                continue
            ids += [START, ASSISTANT]
            learn += [after_model] * 2
            piece = emitted(message, given, last=index == len(self.target) - 1)
            ids += piece
            given.add(piece)
            learn += [True] * len(piece)
            after_model = True
        if self.forced:
            at = len(ids) - len(piece) + piece.index(MESSAGE)
            start = at + 1 if self.forced == "brace" else len(ids) - len(piece) - 2
            learn[start : at + 1 + (self.forced == "brace")] = [False] * (
                at + 1 + (self.forced == "brace") - start
            )
        return np.asarray(ids, np.int32), np.asarray(learn, np.bool_)


def emitted(message: Message, given: Given, last: bool) -> list[int]:
    """Returns the tokens of a model's message in the order of generation, after ``<|start|>assistant``."""
    encode = given.encode
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
