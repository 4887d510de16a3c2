"""Compaction within a turn: a prompt that has grown to a threshold becomes a summary, and the turn goes on.

It happens before a round (the first one, or one after a tool). The summary is a separate generation over
the whole prompt with one more message, so that the prefix cache has all but that message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chorale.client.base import EngineInfo
from chorale.engine.types import SamplingSpec
from chorale.grammar.frames import Frames, turn_grammar
from chorale.harmony.messages import Message
from chorale.harmony.render import ASSISTANT, render_message
from chorale.harmony.vocab import START, Vocabulary
from chorale.ids import new_id
from chorale.sampling_fields import IN_SUMMARY
from chorale.turns.choice.emitter import Emitter
from chorale.turns.choice.item import OpenItem
from chorale.turns.choice.needs import Compact, NextRound
from chorale.turns.events import ItemDelta, ItemOpened, Usage

REQUEST = (
    "Summarize this conversation so that it can be continued from your summary alone. Keep what was asked"
    " for, what was decided and why, names, numbers, paths and code that are still needed, what tools"
    " returned, and what is still to be done. Write only the summary."
)
MAX_TOKENS = 8192  # of reasoning and summary: a model that cannot stop must stop
_MIN_TOKENS = 64  # less room than this for a summary, and the turn goes on without one
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Compaction:
    """``first_prompt``: the prompt of a summary before the first round, or None if none is due then.

    ``pack`` turns the summary into the text of the compaction item; ``rebuild`` turns that text into the
    prompt that stands for everything before it.
    """

    threshold: int  # tokens of a prompt
    ask: tuple[int, ...]  # the message that asks for a summary
    first_prompt: tuple[int, ...] | None
    pack: Callable[[str], str]
    rebuild: Callable[[str], list[int]]
    alone: bool = False  # the turn ends with the summary

    def answered_prompt(self, prompt: list[int]) -> list[int]:
        """The known prompt of the answer; after a first summary, all of it but the summary."""
        return prompt if self.first_prompt is None else self.rebuild(self.pack(""))


class Compactor:
    """When one choice is summarized, and the item of each summary. ``spent``: tokens of the summaries."""

    def __init__(self, plan: Compaction | None, out: Emitter) -> None:
        self.spent = Usage()
        self._plan = plan
        self._out = out
        # Tokens of a prompt from which on it is summarized.
        self._threshold = _NEVER if plan is None else plan.threshold

    @property
    def is_due_first(self) -> bool:
        return self._plan is not None and self._plan.first_prompt is not None

    @property
    def ends_turn(self) -> bool:
        return self._plan is not None and self._plan.alone

    def before(self, following: NextRound) -> Compact | None:
        """Return the summary that is due before a round, or None."""
        plan, prompt = self._plan, following.prompt_token_ids
        if plan is None or len(prompt) < self._threshold:
            return None
        if following.num_new_tokens is None and plan.first_prompt is not None:
            return Compact(list(plan.first_prompt), following)
        return Compact([*prompt[:-2], *plan.ask, START, ASSISTANT], following)

    def stop(self) -> None:
        """There is no room for a summary; none is tried again."""
        self._threshold = _NEVER

    def progressed(self) -> None:
        """Open the item; once it is open, emit an empty delta: the summary is being written."""
        if self._out.item is not None:
            self._add("")
            return
        item = OpenItem(self._out.new_index(), "compaction")
        self._out.open(item, ItemOpened(item.index, new_id("cmp"), "compaction"), urgent=True)

    def done(self, packed: str, prompt: list[int], usage: Usage) -> None:
        """Close the item. ``packed``: its text, for which ``prompt`` stands; ``usage``: of the summary."""
        self.spent.add(usage)
        self._add(packed)
        self._out.close("completed")
        # What cannot be made shorter is not summarized again and again.
        assert self._plan is not None
        threshold = self._plan.threshold
        self._threshold = max(threshold, len(prompt) + threshold // 2)

    def _add(self, text: str) -> None:
        assert self._out.item is not None
        self._out.emit(ItemDelta(self._out.item.index, text), urgent=True)


def ask_message() -> Message:
    return Message("user", REQUEST)


def ask_tokens(vocab: Vocabulary) -> tuple[int, ...]:
    return tuple(render_message(ask_message(), vocab))


def reserve(max_model_len: int) -> int:
    """Tokens kept free for a summary."""
    return min(MAX_TOKENS, max_model_len // 4)


def most_tokens(info: EngineInfo) -> int:
    """The longest summary: at most the checkpoint's own default length, if it names one."""
    return int(min(MAX_TOKENS, info.default_sampling.get("max_new_tokens", MAX_TOKENS)))


def sampling_of_pass(spec: SamplingSpec, info: EngineInfo, num_prompt_tokens: int) -> SamplingSpec | None:
    """Sample as the request does, but without its stops, biases and formats.

    Returns None if there is no room for a summary.
    """
    room = min(reserve(info.max_model_len), most_tokens(info), info.max_model_len - num_prompt_tokens)
    if room < _MIN_TOKENS:
        return None
    return SamplingSpec(
        **{name: getattr(spec, name) for name in IN_SUMMARY},
        max_tokens=room,
        grammar=turn_grammar(Frames(reasoning=(room // 2,))),  # no calls, and half is left for the text
    )
