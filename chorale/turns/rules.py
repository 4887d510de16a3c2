"""TurnRules: what a turn of one request may look like, and whether that takes a grammar.

A grammar is used where something binds: a format, a choice of tools, a strict function, a budget. Otherwise
the model writes as it likes and the parser makes the best of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from chorale.api.fields import SamplingFields
from chorale.engine.types import SamplingSpec
from chorale.errors import RequestError
from chorale.grammar.checker import GrammarChecker
from chorale.grammar.constraint import Constraint, json_object, json_schema
from chorale.grammar.frames import MAX_GRAMMAR_BYTES, Call, Frames, raw_grammar, turn_grammar
from chorale.turns.options import CallForm
from chorale.turns.tools.tool_choice import AUTO, Function, ToolChoice

# When an answer is demanded, reasoning leaves it a quarter of the tokens, at most so many: a turn that ends
# within its reasoning would have no answer at all.
MAX_RESERVE = 1024
_STEP = 256  # long allowances are rounded down to it, so that equal requests share one compiled grammar


@dataclass(frozen=True, slots=True)
class Hosted:
    """A tool that the server runs. ``key``: its name in a ``ToolChoice``; ``parameters`` None: any text."""

    recipient: str
    key: str
    parameters: Mapping[str, Any] | None = None

    def arguments(self) -> Constraint | None:
        """A schema that cannot be kept is not the client's fault: any object will do then."""
        if self.parameters is None:
            return None
        try:
            return json_schema({"type": "object", **self.parameters}, "tools")
        except RequestError:
            return json_object("tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    functions: Sequence[Function] = ()
    hosted: Sequence[Hosted] = ()
    choice: ToolChoice = AUTO
    answer: Constraint | None = None
    thinking_budget: int | None = None
    hosted_calls: bool = True  # False: none are left, so no grammar may ask for one

    @property
    def binds(self) -> bool:
        """Whether a grammar is needed."""
        if self.answer is not None or self.thinking_budget is not None:
            return True
        bound = any(f.strict or f.text is not None for f in self.functions)
        return bound or (bool(self.functions or self.hosted) and not self.choice.is_open)

    @property
    def callable_names(self) -> frozenset[str]:
        return frozenset(f.name for f in self.functions if self.choice.may_call(f.name))

    @property
    def call_forms(self) -> dict[str, CallForm]:
        """For ``TurnOptions``: the functions whose calls are more than function calls."""
        return {f.name: f.form for f in self.functions if f.form is not None}

    def frames(self, max_tokens: int | None) -> Frames:
        """``max_tokens``: of the whole output."""
        calls = self._calls()
        forced = self.choice.mode == "required" and bool(calls)  # a server may have listed no tools
        demanded = forced or self.answer is not None
        return Frames(
            calls=calls,
            answer="none" if forced else self.answer or "any",
            reasoning=self._reasoning(max_tokens if demanded else None),
            preambles=bool(calls) and not demanded,
        )

    def _calls(self) -> tuple[Call, ...]:
        choice, forced = self.choice, self.choice.mode == "required"
        calls = [Call(f.name, _arguments(f, forced)) for f in self.functions if choice.may_call(f.name)]
        used = [tool for tool in self.hosted if self.hosted_calls and choice.may_use(tool.key)]
        return (*calls, *(Call(tool.recipient, tool.arguments(), hosted=True) for tool in used))

    def may_use(self, recipient: str) -> bool:
        """Whether a tool of the server may be called."""
        return any(tool.recipient == recipient and self.choice.may_use(tool.key) for tool in self.hosted)

    def later(self, num_calls: int) -> TurnRules:
        """The rules once ``num_calls`` tools of the server have been called."""
        return replace(self, choice=self.choice.satisfied()) if num_calls else self

    def later_grammar(
        self, num_calls: int, calls_left: bool, num_reasoning_tokens: int, max_tokens: int | None
    ) -> str:
        """The grammar of a round after a tool, or "". ``max_tokens``: what is left of the output."""
        rules = self.later(num_calls)
        if rules.thinking_budget is not None:
            budget = max(0, rules.thinking_budget - num_reasoning_tokens)
            rules = replace(rules, thinking_budget=budget)
        if not calls_left:
            rules = replace(rules, hosted_calls=False)
        return turn_grammar(rules.frames(max_tokens)) if rules.binds or not calls_left else ""

    def _reasoning(self, max_tokens: int | None) -> tuple[int, ...] | None:
        if max_tokens is None:
            return None if self.thinking_budget is None else (self.thinking_budget,)
        room = max_tokens - min(max_tokens // 4, MAX_RESERVE) - 16  # 16: headers
        if room > 4 * _STEP:
            room -= room % _STEP
        if self.thinking_budget is not None:
            return (min(self.thinking_budget, max(room, 0)),)
        return (max(room - room // 4, 0), max(room // 4, 0))


def _arguments(function: Function, forced: bool) -> Constraint | None:
    """What a call's arguments must be: an object under the function's schema, whatever that says of types."""
    if function.text is not None or not (forced or function.strict):
        return function.text
    parameters = function.tool.parameters
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False}
    if parameters is not None:
        schema = dict(parameters)
        if not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
            schema["type"] = "object"  # also for one that says ["object", "null"]
    return json_schema(schema, function.param)


async def sound_hosted(checker: GrammarChecker, hosted: Sequence[Hosted]) -> tuple[Hosted, ...]:
    """The tools, those whose schemas do not compile with a schema that does: any object."""
    sound = []
    for tool in hosted:
        arguments = tool.arguments()
        try:
            await checker.check([arguments] if arguments is not None else [])
        except RequestError:
            tool = replace(tool, parameters={"type": "object"})
        sound.append(tool)
    return tuple(sound)


async def with_grammar(
    checker: GrammarChecker, rules: TurnRules, fields: SamplingFields, sampling: SamplingSpec
) -> SamplingSpec:
    """``sampling`` with the grammar of a turn, if ``rules`` need one. Raises ``RequestError``."""
    if not rules.binds:
        return sampling
    frames = rules.frames(sampling.max_tokens)
    await _check(checker, frames.constraints(), fields)
    return _with(sampling, turn_grammar(frames), rules.answer)


async def with_raw_grammar(
    checker: GrammarChecker, answer: Constraint | None, fields: SamplingFields, sampling: SamplingSpec
) -> SamplingSpec:
    """The same for a raw completion, which is the answer from its first token on."""
    if answer is None:
        return sampling
    await _check(checker, [answer], fields)
    return _with(sampling, raw_grammar(answer), answer)


async def _check(checker: GrammarChecker, constraints: Sequence[Constraint], fields: SamplingFields) -> None:
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
        if getattr(fields, name):
            raise RequestError(
                f"{name}: cannot be kept together with structured output, a choice of tools or a budget",
                param=name,
                code="unsupported_value",
            )
    await checker.check(constraints)


def _with(sampling: SamplingSpec, grammar: str, answer: Constraint | None) -> SamplingSpec:
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        param = answer.param if answer is not None else "tools"
        raise RequestError(
            f"{param}: the schemas of this request have more than {MAX_GRAMMAR_BYTES} bytes together",
            param=param,
            code="unsupported_value",
        )
    return msgspec.structs.replace(sampling, grammar=grammar)
