"""TurnRules: the constraints of one request's turn, and whether they need a grammar.

A format, a choice of tools, a strict function or a budget needs a grammar. Otherwise the model is free, and
the parser reads whatever it writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from chorale.config.engine import StrictLevel
from chorale.errors import RequestError
from chorale.grammar.constraint import Constraint, json_object, json_schema
from chorale.grammar.frames import Call, Frames, raw_grammar, turn_grammar
from chorale.harmony.messages import ResponseFormat
from chorale.turns.functions import CallForm, Function

# If an answer is required, a quarter of the tokens, at most this many, is reserved: a turn that ends
# within its reasoning would have no answer at all.
MAX_RESERVE = 1024
_STEP = 256  # long budgets are rounded down to it, so that equal requests share a compiled grammar


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``names``: the only functions that may be called (by their names in the prompt), or None for all.

    ``built_in``: the same for built-in tools: ``web_search``, ``code_interpreter``, ``mcp:LABEL``,
    ``mcp:LABEL:TOOL``. ``lasting``: it applies to the whole turn (``allowed_tools``); a named tool is
    required once.
    """

    mode: Mode = "auto"
    names: frozenset[str] | None = None
    built_in: frozenset[str] | None = None
    lasting: bool = False

    @property
    def is_open(self) -> bool:
        """Returns whether nothing is required or excluded."""
        return self.mode == "auto" and self.names is None and self.built_in is None

    def satisfied(self) -> ToolChoice:
        """Returns the choice that applies once a built-in tool has been called."""
        if self.mode != "required":
            return self
        return replace(self, mode="auto") if self.lasting else AUTO

    def may_call(self, name: str) -> bool:
        return self.mode != "none" and (self.names is None or name in self.names)

    def may_use(self, name: str) -> bool:
        """Returns whether a built-in tool may be called; an MCP server's label covers its tools."""
        if self.mode == "none" or self.built_in is None:
            return self.mode != "none"
        return name in self.built_in or name.rpartition(":")[0] in self.built_in


AUTO = ToolChoice()


@dataclass(frozen=True, slots=True)
class BuiltInTool:
    """``key``: name in a ``ToolChoice``; ``parameters``: schema of its arguments, None for any text."""

    recipient: str
    key: str
    parameters: Mapping[str, Any] | None = None

    def arguments(self) -> Constraint | None:
        """Returns the arguments' schema, or any object if the schema cannot be compiled."""
        if self.parameters is None:
            return None
        try:
            return json_schema({"type": "object", **self.parameters}, "tools")
        except RequestError:
            return json_object("tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """``raw``: the turn is a raw completion, whose answer begins with its first token.

    ``described``: the prompt's description of the answer; ``calls_left``: built-in tools may still be called;
    ``strict_level``: what the operator wants enforced of each call, whatever the request says.
    """

    functions: Sequence[Function] = ()
    built_in: Sequence[BuiltInTool] = ()
    choice: ToolChoice = AUTO
    answer: Constraint | None = None
    described: ResponseFormat | None = None
    thinking_budget: int | None = None
    calls_left: bool = True
    raw: bool = False
    strict_level: StrictLevel = "auto"

    @property
    def binds(self) -> bool:
        """Returns whether a grammar is needed."""
        if self.answer is not None or self.thinking_budget is not None:
            return True
        bound = any(f.strict or f.text is not None for f in self.functions)
        bound = bound or (bool(self.functions) and self.strict_level != "auto")
        return bound or (bool(self.functions or self.built_in) and not self.choice.is_open)

    @property
    def callable_names(self) -> frozenset[str]:
        return frozenset(f.name for f in self.functions if self.choice.may_call(f.name))

    @property
    def call_forms(self) -> dict[str, CallForm]:
        """Returns the forms of calls other than plain function calls, by prompt name."""
        return {f.name: f.form for f in self.functions if f.form is not None}

    @property
    def freeform(self) -> frozenset[str]:
        """Returns the functions whose calls are plain input, by prompt name."""
        return frozenset(f.name for f in self.functions if f.text is not None)

    def grammar(self, max_tokens: int | None) -> tuple[str, list[Constraint]]:
        """Returns the grammar of the turn, or "" if not needed, and its parts, each of which must compile.

        ``max_tokens``: the limit of the whole output.
        """
        if not self.binds:
            return "", []
        if self.raw:
            assert self.answer is not None
            return raw_grammar(self.answer), [self.answer]
        frames = self.frames(max_tokens)
        return turn_grammar(frames), frames.constraints()

    def frames(self, max_tokens: int | None) -> Frames:
        """``max_tokens``: the limit of the whole output."""
        calls = self._calls()
        forced = self.choice.mode == "required" and bool(calls)  # a server may have no tools
        demanded = forced or self.answer is not None
        return Frames(
            calls=calls,
            answer="none" if forced else self.answer or "any",
            reasoning=self._reasoning(max_tokens if demanded else None),
            preambles=bool(calls) and not demanded,
        )

    def _calls(self) -> tuple[Call, ...]:
        choice = self.choice
        checked = choice.mode == "required" or self.strict_level == "parameter"
        calls = [Call(f.name, _arguments(f, checked)) for f in self.functions if choice.may_call(f.name)]
        used = [tool for tool in self.built_in if self.calls_left and choice.may_use(tool.key)]
        return (*calls, *(Call(tool.recipient, tool.arguments(), built_in=True) for tool in used))

    def may_use(self, recipient: str) -> bool:
        """Returns whether a built-in tool may be called."""
        return any(tool.recipient == recipient and self.choice.may_use(tool.key) for tool in self.built_in)

    def later(self, num_calls: int) -> TurnRules:
        """Returns the rules after ``num_calls`` calls to built-in tools."""
        return replace(self, choice=self.choice.satisfied()) if num_calls else self

    def later_grammar(
        self, num_calls: int, calls_left: bool, num_reasoning_tokens: int, max_tokens: int | None
    ) -> str:
        """Returns the grammar of a round after a tool, or "". ``max_tokens``: the rest of the output."""
        rules = self.later(num_calls)
        if rules.thinking_budget is not None:
            budget = max(0, rules.thinking_budget - num_reasoning_tokens)
            rules = replace(rules, thinking_budget=budget)
        if not calls_left:
            rules = replace(rules, calls_left=False)
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


FREE = TurnRules()


def _arguments(function: Function, checked: bool) -> Constraint | None:
    """Returns the schema of a call's arguments, restricted to objects, if they are checked."""
    if function.text is not None or not (checked or function.strict):
        return function.text
    parameters = function.tool.parameters
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False}
    if parameters is not None:
        schema = dict(parameters)
        if not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
            schema["type"] = "object"  # replaces ["object", "null"], too
    return json_schema(schema, function.param)


Mode = Literal["auto", "none", "required"]
