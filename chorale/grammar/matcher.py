"""Compiles a grammar's text to an llguidance matcher, under limits that keep every step short.

Compiling and filling a mask release the interpreter lock. Both are limited by counts, not by time, so a
grammar compiles on every machine or on none. The tokenizer takes 0.6 s, in which it holds the lock, and
150 MB, once per process: build it before the process serves (``warm``).
"""

from __future__ import annotations

import functools
import re
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from chorale.grammar.constraint import Constraint
from chorale.grammar.frames import raw_grammar
from chorale.harmony.vocab import CALL, NUM_RANKS, RETURN, VOCAB_SIZE, load_vocabulary

# 500 optional properties are within these limits. A state in which any of them may follow takes 6 ms (one
# core), a token of such an answer 1.2 ms on average; everything else takes far less. 1,000 would take 24 and
# 3.5 ms.
_LIMITS = LLParserLimits(
    max_lexer_states=50_000, max_items_in_row=2_000, step_max_items=100_000, verbose_errors=False
)
_WALK_STEPS = 24
MAX_CHECK_SECONDS = 2.0  # CPU time of one grammar
_WALK_FIRST = b'"[{,:'  # the walk prefers these bytes, which lead to most of the structure
_UNSATISFIABLE = "nothing satisfies it"
MAX_GBNF_RULES = 500
_GBNF_NAME = re.compile(r"^[ \t]*([A-Za-z][\w-]*)[ \t]*::=", re.MULTILINE)

# Strings in JSON whose masks need not be computed again: most of a mask's time. The library's own list has
# two more, which take a tenth of the tokenizer's time and save nothing that can be measured.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}']
MASK_WORDS = VOCAB_SIZE // 32  # int32 of one row's mask, one bit per token
_lock = threading.Lock()


class _Wrapper:
    """The tokenizer interface that LLTokenizer needs; used only while it is built."""

    eos_token_id = RETURN
    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self) -> None:
        vocab = load_vocabulary()
        self._encode = vocab.encode
        self.tokens = [vocab.token_bytes(token) for token in range(VOCAB_SIZE)]
        self.special_token_ids = list(range(NUM_RANKS, VOCAB_SIZE))

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


@functools.lru_cache(maxsize=1)
def _tokenizer() -> LLTokenizer:
    wrapper: Any = _Wrapper()
    return LLTokenizer(wrapper, n_vocab=VOCAB_SIZE, eos_token=[RETURN, CALL], slices=_SLICES)


def tokenizer() -> LLTokenizer:
    """Return this process's tokenizer. Thread-safe: later callers wait for the first."""
    with _lock:
        return _tokenizer()


def warm() -> threading.Thread:
    """Builds the tokenizer in a separate thread, which the caller joins before it serves."""
    thread = threading.Thread(target=tokenizer, name="grammar-tokenizer", daemon=True)
    thread.start()
    return thread


def compile_grammar(grammar: str) -> LLMatcher:
    """Returns a matcher at the grammar's start. Raises ``ValueError`` with the compiler's message in one
    line."""
    matcher = LLMatcher(tokenizer(), grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise ValueError(explain(matcher.get_error()))
    return matcher


def check_constraint(constraint: Constraint) -> None:
    """Checks the grammar of this constraint alone. Raises ``ValueError`` as ``check_grammar`` does."""
    check_grammar(raw_grammar(constraint))


def check_grammar(grammar: str) -> None:
    """Raises ``ValueError`` unless the grammar compiles, allows a first token, and a short walk exceeds no
    limit.

    Some grammars compile quickly but exceed the limits at their first choice; they are refused early.
    """
    began = time.thread_time()
    matcher = compile_grammar(grammar)
    for step in range(_WALK_STEPS):
        if time.thread_time() - began > MAX_CHECK_SECONDS:
            raise ValueError(f"takes longer than {MAX_CHECK_SECONDS:g} s to compile")
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        _check_walk(matcher)
        if not mask.any():
            if step == 0:
                raise ValueError(_UNSATISFIABLE)
            return
        token = _next_token(mask)
        if token >= NUM_RANKS:  # the end of the output
            return
        matcher.consume_token(token)
        _check_walk(matcher)


def _check_walk(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = explain(matcher.get_error())
        raise ValueError(reason if reason == _UNSATISFIABLE else f"too complex: {reason}")


def _next_token(mask: npt.NDArray[np.uint8]) -> int:
    """Returns an allowed token of a mask that is not empty. Short tokens have low ids."""
    for token in _first_tokens():
        if mask[token >> 3] >> (token & 7) & 1:
            return token
    octet = int(np.flatnonzero(mask)[0])
    return octet * 8 + int(np.unpackbits(mask[octet : octet + 1], bitorder="little").argmax())


@functools.lru_cache(maxsize=1)
def _first_tokens() -> tuple[int, ...]:
    vocab = load_vocabulary()
    return tuple(vocab.encode(chr(byte))[0] for byte in _WALK_FIRST)


def to_lark(grammar: str) -> str:
    """Returns ``grammar``, or its translation if it is in GBNF (``name ::= ...``). Raises ``ValueError``."""
    if "::=" not in grammar:
        return grammar
    names = _GBNF_NAME.findall(grammar)
    if len(names) > MAX_GBNF_RULES:  # the translation takes quadratic time
        raise ValueError(f"has more than {MAX_GBNF_RULES} rules")
    if len(set(names)) < len(names):
        raise ValueError(f"defines a rule twice: {max(names, key=names.count)[:100]}")
    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # a bare one for an unknown rule, others for other faults
        raise ValueError(f"cannot be read as GBNF ({error})") from None


def explain(error: str) -> str:
    """Returns the core of an llguidance error, without positions in the translated grammar."""
    lines = error.strip().splitlines() or ["cannot be compiled"]
    line = lines[0]
    if line.endswith(":"):  # for a regex, the pattern and a pointer follow, then the reason
        reason = next((f" {found[7:]}" for found in lines if found.startswith("error: ")), "")
        line += f" {lines[1].strip()}:{reason}" if reason and len(lines[1]) <= 100 else reason
    for prefix in ("failed to compile JSON schema: ", "): "):
        _, found, rest = line.partition(prefix)
        line = rest if found and rest else line
    line = line.removeprefix("Parser Error: ")
    for advice in ("; consider ", " Enable '"):  # advice for authors of grammars
        line = line.partition(advice)[0]
    if line.startswith("NoExtension"):
        return _UNSATISFIABLE
    return line[:300]
