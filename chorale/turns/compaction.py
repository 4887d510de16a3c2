"""Compaction within a turn: a prompt above a threshold is replaced by a summary, and the turn continues.

It happens before a round (the first, or one after a tool). The summary is a separate generation from the
whole prompt plus one message, so the prefix cache covers all but that message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chorale.client.base import EngineInfo
from chorale.config.sampling_fields import IN_SUMMARY
from chorale.engine.types import SamplingSpec
from chorale.grammar.frames import Frames, turn_grammar
from chorale.harmony.messages import Message
from chorale.harmony.render import render_message
from chorale.harmony.vocab import Vocabulary

REQUEST = (
    "Summarize this conversation so that it can be continued from your summary alone. Keep what was asked"
    " for, what was decided and why, names, numbers, paths and code that are still needed, what tools"
    " returned, and what is still to be done. Write only the summary."
)
MAX_TOKENS = 8192  # limit of reasoning and summary together
_MIN_TOKENS = 64  # with less room, the turn continues without a summary


@dataclass(frozen=True, slots=True)
class Compaction:
    """``first_prompt``: the prompt of a summary before the first round, or None if none is due.

    ``pack`` converts the summary to the text of the compaction item; ``rebuild`` converts that text to the
    prompt that replaces everything before it.
    """

    threshold: int  # tokens of a prompt
    ask: tuple[int, ...]  # the message that requests a summary
    first_prompt: tuple[int, ...] | None
    pack: Callable[[str], str]
    rebuild: Callable[[str], list[int]]
    alone: bool = False  # the turn ends with the summary

    def answered_prompt(self, prompt: list[int]) -> list[int]:
        """The known prompt of the answer; after a first summary, all of it but the summary."""
        return prompt if self.first_prompt is None else self.rebuild(self.pack(""))


def ask_message() -> Message:
    return Message("user", REQUEST)


def ask_tokens(vocab: Vocabulary) -> tuple[int, ...]:
    return tuple(render_message(ask_message(), vocab))


def reserve(max_model_len: int) -> int:
    """Returns the tokens kept free for a summary."""
    return min(MAX_TOKENS, max_model_len // 4)


def most_tokens(info: EngineInfo) -> int:
    """Returns the longest summary: at most the checkpoint's default length, if it has one."""
    return int(min(MAX_TOKENS, info.default_sampling.get("max_new_tokens", MAX_TOKENS)))


def sampling_of_pass(spec: SamplingSpec, info: EngineInfo, num_prompt_tokens: int) -> SamplingSpec | None:
    """Returns the request's sampling without stops, biases and formats.

    Returns None if there is no room for a summary.
    """
    room = min(reserve(info.max_model_len), most_tokens(info), info.max_model_len - num_prompt_tokens)
    if room < _MIN_TOKENS:
        return None
    return SamplingSpec(
        **{name: getattr(spec, name) for name in IN_SUMMARY},
        max_tokens=room,
        grammar=turn_grammar(Frames(reasoning=(room // 2,))),  # no calls; half of the tokens is for the text
    )
