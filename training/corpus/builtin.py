"""The built-in tools: python for arithmetic that is too large, browser with a citation."""

from __future__ import annotations

import json

from chorale.harmony.builtin_tools import browser_tools, python_tool
from training.corpus.base import Dialogue, Draw

_SIGNS = {"+": ("{a} + {b}", "plus"), "-": ("{a} - {b}", "minus"), "*": ("{a} * {b}", "times")}


def python(draw: Draw) -> Dialogue:
    sign = draw.pick(list(_SIGNS))
    a, b = draw.integer(1000, 10 ** draw.integer(4, 8)), draw.integer(31, 10 ** draw.integer(3, 7))
    expression = f"{a} {sign} {b}"
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="python")
    dialogue.builtins = (python_tool(stateful=draw.chance(0.5)),)
    asks = (
        "What is {e}?",
        "{e}",
        "Compute {e}.",
        "Calculate {e}",
        "How much is {e}?",
        "Work out {e} exactly.",
        "What's {e}?",
        "Please compute {e}",
    )
    dialogue.user(draw.phrase(asks).format(e=expression))
    if dialogue.effort != "low":
        dialogue.think(
            "These numbers are large, so I use python."
            + (" It computes exactly." if dialogue.effort == "high" else "")
        )
    dialogue.call_builtin("python", f"print({expression})")
    dialogue.result("python", f"{result}\n" if draw.chance(0.5) else str(result), channel="analysis")
    dialogue.say(f"{expression.replace('*', '×')} = {result}")
    dialogue.answer = {"calls": [("python", f"print({expression})")], "needed": [str(result)]}
    return dialogue


def browser(draw: Draw) -> Dialogue:
    """Search, open the right result, answer from a line of the page, cite it."""
    subject, thing = draw.name(), draw.word()
    fact = " ".join(draw.words(draw.integer(2, 5)))
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="browser")
    dialogue.builtins = (browser_tools(),)
    asks = ("What is the {t} of {s}?", "Find the {t} of {s}.", "Search the web: {t} of {s}", "Look up the {t} of {s}.",
            "Which {t} does {s} have?", "Tell me the {t} of {s}.")  # fmt: skip
    dialogue.user(draw.phrase(asks).format(t=thing, s=subject))
    query = f"{subject} {thing}"
    if dialogue.effort != "low":
        dialogue.think(f"I do not know this, so I search for {query}.")
    dialogue.call_builtin("browser.search", json.dumps({"query": query}, separators=(",", ":")))
    titles = [draw.name() for _ in range(3)]
    right = draw.integer(0, 2)
    titles[right] = f"{subject} {thing}"
    page_number = draw.integer(0, 6)  # pages of earlier turns count, too
    links = "\n".join(
        f"L{i}:   * 【{i}†{title}†{draw.word()}.com】 {' '.join(draw.words(3))}"
        for i, title in enumerate(titles)
    )
    dialogue.result(
        "browser.search",
        f"[{page_number}] {query} (web-search://ts=0)\n**viewing lines [0 - 3] of 3**\n\n{links}",
        "analysis",
    )
    if dialogue.effort == "high":
        dialogue.think(f"Result {right} fits. I open it.")
    page_number += 1
    dialogue.call_builtin("browser.open", json.dumps({"id": right}, separators=(",", ":")))
    lines = [" ".join(draw.words(draw.integer(3, 8))) for _ in range(draw.integer(3, 7))]
    line = draw.integer(0, len(lines) - 1)
    lines[line] = f"The {thing} of {subject} is {fact}."
    page = "\n".join(f"L{i}: {text}" for i, text in enumerate(lines))
    head = f"[{page_number}] {titles[right]} (https://{draw.word()}.com/{draw.word()})\n**viewing lines [0 - {len(lines) - 1}] of {len(lines) - 1}**\n\n"
    dialogue.result("browser.open", head + page, "analysis")
    if dialogue.effort != "low":
        dialogue.think(f"Line {line} has it.")
    dialogue.say(f"The {thing} of {subject} is {fact}. 【{page_number}†L{line}】")
    dialogue.answer = {
        "calls": [("browser.search", query), ("browser.open", right)],
        "needed": [fact, f"【{page_number}†L{line}】"],
    }
    return dialogue
