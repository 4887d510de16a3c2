"""Rounds: the prompts of one choice, and the start of each later round."""

from __future__ import annotations

from chorale.harmony.render import ASSISTANT, FINAL
from chorale.harmony.vocab import CHANNEL, END, MESSAGE, START
from chorale.turns.choice.emitter import Emitter
from chorale.turns.choice.reader import RoundReader
from chorale.turns.choice.tool_use import ToolUse
from chorale.turns.needs import NextRound
from chorale.turns.request import TurnRequest


class Rounds:
    """``prompt``: the current round's; changed only by the methods here."""

    def __init__(self, request: TurnRequest, out: Emitter, tools: ToolUse | None) -> None:
        self.prompt = request.prompt_token_ids
        self._out = out
        self._tools = tools
        self._max_tokens = request.sampling.max_tokens
        self._grammar = request.sampling.grammar
        self._grammar_start = len(self.prompt)  # the grammar covers later prompts from here on

    @property
    def is_spent(self) -> bool:
        """Returns whether no token is left to generate."""
        return self._max_tokens is not None and len(self._out.sampled) >= self._max_tokens

    def first(self, prompt: list[int]) -> NextRound:
        """Returns the request's own round with a replaced prompt."""
        self.prompt = prompt
        self._grammar_start = self._out.usage.input_tokens = len(prompt)
        return NextRound(prompt, grammar=self._grammar)

    def after_tool(self, prompt: list[int], num_new_tokens: int) -> NextRound:
        """Returns a round that follows a tool; its grammar covers the rest of the output."""
        num_sampled = len(self._out.sampled)
        left = None if self._max_tokens is None else self._max_tokens - num_sampled
        assert self._tools is not None
        grammar = self._tools.grammar(left, self._out.usage.reasoning_tokens)
        return NextRound(prompt, num_new_tokens=num_new_tokens, grammar=grammar, num_sampled=num_sampled)

    def answer(self, reader: RoundReader) -> NextRound:
        """Returns the prompt so far, closed, with the header of a final message."""
        sampled = self._out.sampled
        header = (CHANNEL, FINAL, MESSAGE)
        prompt = list(self.prompt)
        if reader.frames_end is not None:
            prompt += [*sampled[reader.start : reader.frames_end], END, START, ASSISTANT]
        prompt += header
        num_own_tokens = len(prompt) - self._grammar_start
        return NextRound(prompt, header, num_own_tokens, None, self._grammar, len(sampled))

    def begin(self, following: NextRound) -> None:
        """Continues with ``following``, which has been submitted."""
        prompt = self.prompt = following.prompt_token_ids
        self._grammar = following.grammar
        if following.num_new_tokens is not None:
            self._grammar_start = len(prompt)
            self._out.count_prompt(len(prompt), len(prompt) - following.num_new_tokens)
