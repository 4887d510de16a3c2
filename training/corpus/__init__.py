"""The synthetic corpus: one function per family, mixed by weight. ``sample(seed, split)`` is its only interface."""

from __future__ import annotations

import random
from collections.abc import Callable

from chorale.harmony.messages import Message
from training.corpus import (
    arithmetic,
    builtin,
    calculation,
    endings,
    entities,
    languages,
    letters,
    lists,
    loose_json,
    sentiment,
    structured,
    talk,
    tools,
)
from training.corpus.base import Dialogue, Draw, Split

Family = Callable[[Draw], Dialogue]

# family -> weight in training
MIXTURE: dict[Family, float] = {
    talk.chat: 5,
    talk.cannot: 4,
    talk.too_large: 1,
    arithmetic.sums: 8,
    arithmetic.differences: 5,
    arithmetic.products: 9,
    arithmetic.follow_up: 1.5,
    lists.reverse: 4,
    lists.sort_numbers: 3,
    lists.count: 3,
    lists.nth: 3,
    lists.extract: 4,
    lists.copy: 7,
    lists.remember: 3,
    structured.json_answer: 26,
    tools.one_call: 36,
    tools.natural_call: 6,
    tools.two_calls: 11,
    tools.same_tool_twice: 4,
    builtin.python: 3,
    builtin.browser: 5,
    builtin.search: 2,
    calculation.division: 11,
    calculation.three_terms: 8,
    calculation.spoken: 2,
    calculation.compare: 2,
    calculation.of_list: 10,
    letters.change: 26,
    letters.count: 12,
    sentiment.plain: 4,
    sentiment.classify: 9,
    sentiment.as_json: 1.5,
    entities.plain: 7,
    entities.as_json: 7,
    languages.chat: 6,
    loose_json.bare: 18,
    loose_json.asked: 1.5,
    loose_json.forced: 1.5,
    endings.stray: 3,
    endings.told: 0.7,
    endings.no_calls: 1.5,
    endings.summary: 2,
}


# Families whose output a grammar forces. Evaluations have no grammar, so their conversations exclude these.
FORCED = (loose_json.forced, endings.no_calls)

_MORE_PLAIN = (
    talk.chat, talk.chat, talk.chat, talk.chat, talk.cannot, arithmetic.differences, lists.sort_numbers, lists.count, lists.nth,
    lists.extract, lists.remember, arithmetic.follow_up, calculation.division, calculation.three_terms, calculation.of_list,
    letters.change, languages.chat, sentiment.plain, loose_json.bare, entities.plain,
)  # fmt: skip


def with_tools(draw: Draw) -> Dialogue:
    """A request that needs no tool, although tools are declared: they must not be called."""
    choices = (talk.chat, arithmetic.sums, lists.copy, lists.reverse, talk.cannot, arithmetic.products)
    plain = draw.pick(choices + _MORE_PLAIN if draw.split == "train" else choices)
    dialogue = plain(draw)
    # A well-known tool might be able to answer a question about facts.
    known = 0.0 if plain is talk.cannot else 0.3
    box = tools.toolbox(draw, draw.integer(1, 4), known=known)
    dialogue.functions = tuple(tool.description for tool in box)
    dialogue.family = "no_call"
    _polite(draw, dialogue)
    if draw.split == "train" and draw.chance(0.2):
        tools.past_calls(draw, dialogue, box)
    return dialogue


BEFORE = (
    "Hi, ", "Hello! ", "Hey, ", "Quick question: ", "One more thing: ", "Ok. ", "Now: ", "Next: ", "Good morning. ", "Hello, ",
    "I have a question. ", "Hi there! ", "Question: ", "Thanks. ", "So: ", "Please help: ",
)  # fmt: skip
AFTER = (
    " Thanks!",
    " Thank you.",
    " Please.",
    " Thank you very much!",
    " Thanks in advance.",
    " That is all.",
)


def _polite(draw: Draw, dialogue: Dialogue) -> None:
    """Sometimes adds polite words around the user's last message."""
    before, after = draw.chance(0.12), draw.chance(0.08)
    index = max(i for i, message in enumerate(dialogue.history) if message.role == "user")
    text = dialogue.history[index].content
    if dialogue.family in ("talk", "copy") or not isinstance(text, str):
        return
    if before:
        text = draw.pick(BEFORE) + text
    if after and text[-1] in ".?!":
        text += draw.pick(AFTER)
    dialogue.history[index] = Message("user", text)


MIXTURE[with_tools] = 8


INSTRUCTIONS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "Be brief.", "Answer politely.", "You are helpful.",
    "You are a friendly assistant who answers shortly.", "Use the tools when they help.", "Answer in English.",
    "You are an assistant for customers.", "Help the user.", "Reasoning: low", "Reasoning: medium", "Reasoning: high",
    "You are a helpful assistant.\nReasoning: high", "Be concise.", "You are a chatbot.",
)  # fmt: skip
EARLIER = (talk.chat, arithmetic.sums, arithmetic.products, lists.copy, lists.reverse, talk.cannot)


def sample(seed: int, split: Split = "train", family: Family | None = None) -> Dialogue:
    """Returns one dialogue, determined by (seed, split, family); some have instructions and earlier turns."""
    rng = random.Random(f"{split}-{seed}")
    chosen = family or rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
    draw = Draw(rng, split)
    dialogue = chosen(draw)
    if dialogue.instructions is None and draw.chance(0.2):
        dialogue.instructions = draw.pick(INSTRUCTIONS)
    # A summary covers all earlier turns, so none are added before it.
    while dialogue.family != "summary" and draw.chance(0.12 if split != "train" else 0.2):
        earlier = draw.pick(EARLIER if split != "train" else EARLIER + _MORE_PLAIN)(draw)
        answer = earlier.target[-1].content
        dialogue.history = [
            *earlier.history,
            Message("assistant", answer, channel="final"),
            *dialogue.history,
        ]
        if split != "train":
            break
    return dialogue


FAMILIES = ("talk", "cannot", "too_large", "sum", "difference", "product", "follow_up", "reverse", "sort", "count", "nth",
            "extract", "copy", "remember", "json", "call", "two_calls", "python", "browser", "no_call",
            "natural", "division", "three_terms", "spoken", "compare", "of_list", "letters", "letter_count", "sentiment",
            "sentiment_call", "entities", "entities_json", "languages", "bare_json", "stray", "no_calls", "summary", "search")  # fmt: skip
