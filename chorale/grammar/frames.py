"""Makes one grammar over harmony frames from the rules of a turn: free reasoning, then the constrained part.

Special tokens are named by id and occur only where a frame has them, so text cannot contain any. Headers are
matched as bytes, not as tokens, because "functions." and a name together have other tokens than each alone.
A call's header may have either order that the model knows: channel first, which it prefers, or recipient
first, as in histories from other servers.

The grammar is a JSON list: the frames in Lark, and every constraint as a separate grammar, referenced by
name, so that a client's text cannot affect the frames.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from chorale.grammar.constraint import Constraint
from chorale.harmony import vocab as v

MAX_GRAMMAR_BYTES = 512 * 1024  # all constraints of one turn

MAX_REASONING = 64  # messages (reasoning and preambles) after which a call or the answer must follow

_TEXT = f"<[0-{v.NUM_RANKS - 1}]>"  # any ordinary token
_PIECES = f"""next: <[{v.START}]> "assistant"
json_type: " " <[{v.CONSTRAIN}]> "json" | <[{v.CONSTRAIN}]> "json" | " json"
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that may be called. ``arguments`` None: any text. If the arguments are not JSON, the header does
    not declare them as JSON.

    ``built_in``: ``name`` is the whole recipient, and calls may also be on the analysis channel, as the model
    has learned for built-in tools.
    """

    name: str
    arguments: Constraint | None = None
    built_in: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """The allowed parts of a turn, in order: reasoning, then one call or the answer.

    ``reasoning``: the maximum number of tokens of each reasoning message; None: up to ``MAX_REASONING``
    messages of any length. ``answer``: the constraint of the final message, "any" for any text, or "none" for
    no final message. ``preambles``: messages to the user may precede the call or answer.
    """

    calls: tuple[Call, ...] = ()
    answer: Constraint | Literal["any", "none"] = "any"
    reasoning: tuple[int, ...] | None = None
    preambles: bool = False

    def constraints(self) -> list[Constraint]:
        found = [call.arguments for call in self.calls if call.arguments is not None]
        return found + ([self.answer] if isinstance(self.answer, Constraint) else [])


def turn_grammar(frames: Frames) -> str:
    """Return the grammar of what follows ``<|start|>assistant``, up to ``<|return|>`` or ``<|call|>``."""
    rules = [*_reasoning_rules(frames), _PIECES]
    entries = []
    ends = []
    for position, call in enumerate(frames.calls):
        ends.append(f"call_{position}")
        rules.append(_call_rule(position, call))
        if call.arguments is not None:
            entries.append(call.arguments.entry(f"arguments_{position}"))
    if frames.answer != "none":
        ends.append("final")
        rules.append(_final_rule(frames.answer))
    if isinstance(frames.answer, Constraint):
        entries.append(frames.answer.entry("answer"))
    rules.append(f"end: {' | '.join(ends)}")
    return _listed("\n".join(rules), entries)


def raw_grammar(constraint: Constraint) -> str:
    """Return the grammar of output that matches the constraint from its first token on."""
    return _listed("start: @answer", [constraint.entry("answer")])


def _listed(start: str, entries: list[dict[str, object]]) -> str:
    grammars = [{"lark_grammar": start}, *entries]
    return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))


def _reasoning_rules(frames: Frames) -> list[str]:
    preamble = f'preamble: <[{v.CHANNEL}]> "commentary" <[{v.MESSAGE}]> {_TEXT}+ <[{v.END}]>'
    before = "(preamble next)* " if frames.preambles else ""
    rules = [preamble] if frames.preambles else []
    if frames.reasoning is None:
        kinds = "(think | preamble)" if frames.preambles else "think"
        return [f"start: ({kinds} next){{0,{MAX_REASONING}}} end", *rules, _think_rule("think", f"{_TEXT}*")]
    bounds = [bound for bound in frames.reasoning if bound > 0]
    rules.append(f"start: rest_{0}")
    for position, bound in enumerate(bounds):
        rules.append(f"rest_{position}: think_{position} next rest_{position + 1} | {before}end")
        rules.append(_think_rule(f"think_{position}", f"{_TEXT}{{0,{bound}}}"))
    rules.append(f"rest_{len(bounds)}: {before}end")
    return rules


def _think_rule(name: str, text: str) -> str:
    return f'{name}: <[{v.CHANNEL}]> "analysis" <[{v.MESSAGE}]> {text} <[{v.END}]>'


def _call_rule(position: int, call: Call) -> str:
    if call.built_in:
        return _built_in_rule(position, call)
    recipient = f" to=functions.{call.name}"
    kind = " json_type?" if call.arguments is None or call.arguments.is_json else ""
    channel_first = f'<[{v.CHANNEL}]> "commentary{recipient}"{kind}'
    recipient_first = f'"{recipient}" <[{v.CHANNEL}]> "commentary"{kind}'
    arguments = f"{_TEXT}*" if call.arguments is None else f"@arguments_{position}"
    header = f"({channel_first} | {recipient_first}) <[{v.MESSAGE}]>"
    return f"call_{position}: {header} {arguments} <[{v.CALL}]>"


def _built_in_rule(position: int, call: Call) -> str:
    """Return the rule of a built-in tool's call. Each header is one string, because the lexer takes the
    longest match and does not backtrack."""
    channels = ("analysis", "commentary")
    kind = '(json_type | " code")?'
    first = " | ".join(f'"{channel} to={call.name}"' for channel in channels)
    last = " | ".join(f'"{channel}"' for channel in channels)
    header = f'(<[{v.CHANNEL}]> ({first}) {kind} | " to={call.name}" <[{v.CHANNEL}]> ({last}) {kind})'
    arguments = f"{_TEXT}+" if call.arguments is None else f"@arguments_{position}"
    return f"call_{position}: {header} <[{v.MESSAGE}]> {arguments} <[{v.CALL}]>"


def _final_rule(answer: Constraint | str) -> str:
    kind = " json_type?" if isinstance(answer, Constraint) and answer.is_json else ""
    text = "@answer" if isinstance(answer, Constraint) else f"{_TEXT}+"
    return f'final: <[{v.CHANNEL}]> "final"{kind} <[{v.MESSAGE}]> {text} <[{v.RETURN}]>'
