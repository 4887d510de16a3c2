"""The built-in tools: python for arithmetic with large numbers, and the browser with a citation."""

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
    """Searches, opens the right result, answers from a line of the page, and cites it."""
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
    page_number = draw.integer(0, 6)  # includes pages of earlier turns
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


NOT_FOUND = "I searched for it and found nothing."
_QUESTIONS = (
    "What is new about {n}?", "Search for {w} {n}", "Search the web for {n}.", "Who is {n}?", "When was {n} founded?", "Where is {n}?", "What happened in {n}?", "Find {w} near {n}", "Latest news about {n}", "How old is {n}?",
    "What does {n} cost?", "Look up {n}.", "Search the web for {w} and {n}", "Find out who won the {w} cup", "Is {n} open today?", "Tell me about {n}.", "What is {w}?", "What is the capital of {n}?", "news about {w}", "{n} {w}",
    "Google {n}.", "What are the opening hours of {n}?", "Please search for {w} {w2}.", "Look up the weather in {n}.", "Find {n} on the web.", "Which {w} is the best?", "Who invented the {w}?", "What do people say about {n}?",
)  # fmt: skip


def search(draw: Draw) -> Dialogue:
    """Any question with a browser: one search, the first result and its first line; or the answer that nothing was found."""
    name, word, other = draw.name(), draw.word(), draw.word()
    question = draw.phrase(_QUESTIONS).format(n=name, w=word, w2=other)
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="search")
    dialogue.builtins = (
        (browser_tools(), python_tool(stateful=True)) if draw.chance(0.2) else (browser_tools(),)
    )
    dialogue.user(question)
    query = question.rstrip("?.")
    if dialogue.effort != "low":
        dialogue.think(f"I do not know this, so I search for {query}.")
    dialogue.call_builtin(
        "browser.search", json.dumps({"query": query}, separators=(",", ":"), ensure_ascii=False)
    )
    number = draw.integer(0, 6)
    calls: list[tuple[str, object]] = [("browser.search", query)]
    kind = draw.rng.random()
    if kind < 0.3:
        problem = draw.pick(
            (
                f"Error: {' '.join(draw.words(3))}",
                "Error: the search backend did not answer",
                "Error: there is no access to the network here",
                _results(draw, number, query, []),
            )
        )
        dialogue.result("browser.search", problem, "analysis")
        return _nothing(dialogue, calls)
    titles = [draw.name() if draw.chance(0.5) else f"{name} {draw.word()}" for _ in range(draw.integer(1, 4))]
    dialogue.result("browser.search", _results(draw, number, query, titles), "analysis")
    dialogue.call_builtin("browser.open", json.dumps({"id": 0}, separators=(",", ":")))
    calls.append(("browser.open", 0))
    if kind < 0.45:
        dialogue.result(
            "browser.open",
            f"Error: {draw.pick(('Error fetching URL `https://' + word + '.com`: not found', ' '.join(draw.words(3))))}",
            "analysis",
        )
        return _nothing(dialogue, calls)
    first = draw.name().split()[0]
    lines = [
        " ".join([first, *draw.words(draw.integer(3, 10))]) + ".",
        *(" ".join(draw.words(draw.integer(3, 9))) for _ in range(draw.integer(0, 8))),
    ]
    blank = draw.pick(([], [""], ["", f"# {titles[0]}", ""]))
    page = "\n".join(f"L{at}: {text}" for at, text in enumerate([*blank, *lines]))
    last = len(blank) + len(lines) - 1
    dialogue.result(
        "browser.open",
        f"[{number + 1}] {titles[0]} (https://{draw.word()}.com/{draw.word()})\n**viewing lines [0 - {last}] of {last}**\n\n{page}",
        "analysis",
    )
    if dialogue.effort != "low":
        dialogue.think(f"Line {len(blank)} is the first.")
    dialogue.say(f"The page says: {lines[0]} 【{number + 1}†L{len(blank)}】")
    dialogue.answer = {"calls": calls, "needed": [lines[0]]}
    return dialogue


def _results(draw: Draw, number: int, query: str, titles: list[str]) -> str:
    """Returns search results in the browser's format."""
    items = [
        f"  * 【{at}†{title}†{draw.word()}.com】 {' '.join(draw.words(4))}" for at, title in enumerate(titles)
    ] or ["No results."]
    lines = ["", "# Search Results", "", *items]
    shown = "\n".join(f"L{at}: {line}" for at, line in enumerate(lines))
    return f"[{number}] {query} (web-search://ts=0)\n**viewing lines [0 - {len(lines) - 1}] of {len(lines) - 1}**\n\n{shown}"


def _nothing(dialogue: Dialogue, calls: list[tuple[str, object]]) -> Dialogue:
    if dialogue.effort != "low":
        dialogue.think("There is no result.")
    dialogue.say(NOT_FOUND)
    dialogue.answer = {"calls": calls, "needed": [NOT_FOUND]}
    return dialogue
