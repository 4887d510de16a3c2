"""Grammars of turns whose tools run on the server: recipients as they are, calls on the analysis channel."""

from __future__ import annotations

import pytest

from chorale.grammar import constraint as make
from chorale.grammar.frames import Call, Frames, turn_grammar
from chorale.turns.rules import BuiltInTool, ToolChoice, TurnRules
from tests.grammar.test_frames import accepts

QUERY = make.json_schema(
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}, "p"
)
FINAL = "<|channel|>final<|message|>text<|return|>"
THINK = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FRAMES = Frames(
    calls=(Call("browser.search", QUERY, built_in=True), Call("python", built_in=True), Call("get")),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<|channel|>analysis to=browser.search code<|message|>{"query":"x"}<|call|>', True),
        ('<|channel|>commentary to=browser.search <|constrain|>json<|message|>{"query":"x"}<|call|>', True),
        (' to=browser.search<|channel|>analysis code<|message|>{"query":"x"}<|call|>', True),
        ('<|channel|>analysis to=browser.search<|message|>{"query":"x"}<|call|>', True),
        ('<|channel|>analysis to=browser.search code<|message|>{"q":1}<|call|>', False),
        ('<|channel|>analysis to=browser.open code<|message|>{"id":1}<|call|>', False),
        ("<|channel|>analysis to=python code<|message|>import math\nprint(1)<|call|>", True),
        ("<|channel|>analysis to=python code<|message|><|call|>", False),
        (THINK + "<|channel|>analysis to=python<|message|>1<|call|>", True),
        ("<|channel|>analysis to=python code<|message|>1<|return|>", False),
        ("<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}<|call|>", True),
        ("<|channel|>commentary to=functions.python code<|message|>1<|call|>", False),
        (FINAL, True),
    ],
)
def test_calls_to_built_in_tools_match_the_grammar(text: str, expected: bool) -> None:
    assert accepts(turn_grammar(FRAMES), text) is expected


RULES = TurnRules(
    built_in=(
        BuiltInTool("python", "code_interpreter"),
        BuiltInTool("srv.echo", "mcp:srv:echo", {"type": "object"}),
    ),
    choice=ToolChoice("required"),
)
PYTHON = "<|channel|>analysis to=python code<|message|>1<|call|>"
ECHO = "<|channel|>commentary to=srv.echo <|constrain|>json<|message|>{}<|call|>"


def later(rules: TurnRules, num_calls: int, calls_left: bool = True) -> str:
    return rules.later_grammar(num_calls, calls_left, 0, 1000)


def test_a_required_call_is_satisfied_by_the_first_call() -> None:
    first = turn_grammar(RULES.frames(1000))
    assert accepts(first, PYTHON)
    assert accepts(first, ECHO)
    assert not accepts(first, FINAL)
    assert later(RULES, 1) == "", "nothing binds any more"
    assert not accepts(later(RULES, 0), FINAL), "a call to a tool that does not exist meets nothing"


@pytest.mark.parametrize(
    ("choice", "python", "echo", "final"),
    [
        (ToolChoice("required", frozenset(), frozenset({"code_interpreter"})), True, False, False),
        (ToolChoice("required", frozenset(), frozenset({"mcp:srv"})), False, True, False),
        (ToolChoice("required", frozenset(), frozenset({"mcp:srv:echo"})), False, True, False),
        (ToolChoice("auto", frozenset(), frozenset({"mcp:srv"}), lasting=True), False, True, True),
        (ToolChoice("none"), False, False, True),
    ],
)
def test_tool_choice_restricts_the_grammar(choice: ToolChoice, python: bool, echo: bool, final: bool) -> None:
    rules = TurnRules(built_in=RULES.built_in, choice=choice)
    assert rules.binds
    grammar = turn_grammar(rules.frames(1000))
    assert (accepts(grammar, PYTHON), accepts(grammar, ECHO), accepts(grammar, FINAL)) == (
        python,
        echo,
        final,
    )


def test_allowed_tools_apply_to_the_whole_turn() -> None:
    choice = ToolChoice("required", frozenset(), frozenset({"mcp:srv"}), lasting=True)
    grammar = later(TurnRules(built_in=RULES.built_in, choice=choice), 1)
    assert (accepts(grammar, PYTHON), accepts(grammar, ECHO), accepts(grammar, FINAL)) == (False, True, True)


def test_without_calls_left_the_other_rules_apply() -> None:
    answer = make.json_object("p")
    grammar = later(TurnRules(built_in=RULES.built_in, answer=answer), 2, calls_left=False)
    assert not accepts(grammar, PYTHON)
    assert accepts(grammar, "<|channel|>final<|message|>{}<|return|>")
    assert not accepts(grammar, FINAL)


def test_a_server_without_tools_cannot_be_required() -> None:
    rules = TurnRules(choice=ToolChoice("required", frozenset(), frozenset({"mcp:srv"})))
    assert accepts(turn_grammar(rules.frames(1000)), FINAL)


def test_a_thinking_budget_applies_to_the_whole_turn() -> None:
    rules = TurnRules(built_in=RULES.built_in, thinking_budget=3)
    grammar = rules.later_grammar(1, True, 2, 1000)
    assert accepts(grammar, "<|channel|>analysis<|message|>a<|end|><|start|>assistant" + FINAL)
    assert not accepts(grammar, "<|channel|>analysis<|message|>a b c<|end|><|start|>assistant" + FINAL)
