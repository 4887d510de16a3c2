"""Compaction within a turn: a prompt that has grown to a threshold becomes a summary, and the turn goes on.

It happens before a round (the first one, or one after a tool). The summary is a generation of its own, over
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
from chorale.turns.options import TurnOptions

REQUEST = (
    "Summarize this conversation so that it can be continued from your summary alone. Keep what was asked"
    " for, what was decided and why, names, numbers, paths and code that are still needed, what tools"
    " returned, and what is still to be done. Write only the summary."
)
MAX_TOKENS = 8192  # of reasoning and summary: a model that cannot stop must stop
_MIN_TOKENS = 64  # less room than this for a summary, and the turn goes on without one


@dataclass(frozen=True, slots=True)
class Compaction:
    """``first_prompt``: what is read for a summary before the first round; None: none is due then.

    ``pack``: the summary to the text of the compaction item; ``rebuild``: that text to the prompt that
    stands for everything before it.
    """

    threshold: int  # tokens of a prompt
    ask: tuple[int, ...]  # the message that asks for a summary
    first_prompt: tuple[int, ...] | None
    pack: Callable[[str], str]
    rebuild: Callable[[str], list[int]]
    alone: bool = False  # the turn ends with the summary

    def prompt_of_pass(self, prompt: list[int], *, is_first: bool) -> list[int]:
        """``prompt``: of the round that would come next, up to ``<|start|>assistant``."""
        if is_first and self.first_prompt is not None:
            return list(self.first_prompt)
        return [*prompt[:-2], *self.ask, START, ASSISTANT]


def ask_message() -> Message:
    return Message("user", REQUEST)


def ask_tokens(vocab: Vocabulary) -> tuple[int, ...]:
    return tuple(render_message(ask_message(), vocab))


def reserve(max_model_len: int) -> int:
    """Tokens kept free for a summary."""
    return min(MAX_TOKENS, max_model_len // 4)


def most_tokens(info: EngineInfo) -> int:
    """Of a summary: what the checkpoint names as its own default, where it names one."""
    return int(min(MAX_TOKENS, info.default_sampling.get("max_new_tokens", MAX_TOKENS)))


def sampling_of_pass(spec: SamplingSpec, info: EngineInfo, num_prompt_tokens: int) -> SamplingSpec | None:
    """Temperature and the like are the request's; its stops, biases and formats are not the summary's.

    None: there is no room for a summary.
    """
    room = min(reserve(info.max_model_len), most_tokens(info), info.max_model_len - num_prompt_tokens)
    if room < _MIN_TOKENS:
        return None
    return SamplingSpec(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        seed=spec.seed,
        max_tokens=room,
        grammar=turn_grammar(Frames(reasoning=(room // 2,))),  # no calls, and half is left for the text
    )


def options_of_pass(options: TurnOptions, number: str) -> TurnOptions:
    return TurnOptions(
        request_id=f"{options.request_id}.{number}",
        priority=options.priority,
        cache_salt=options.cache_salt,
        arrival_time=options.arrival_time,
    )
