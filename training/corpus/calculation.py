"""Arithmetic beyond one sum: division, three terms, numbers in words, comparisons; each worked out in the analysis."""

from __future__ import annotations

from training.corpus.arithmetic import difference_working, number, product_working, sum_working
from training.corpus.base import Dialogue, Draw, held_out

DIVISION = (
    "What is {a} / {b}?", "{a} / {b}", "{a}/{b}", "Divide {a} by {b}.", "What's {a} divided by {b}?", "{a} divided by {b}",
    "Compute {a} / {b}.", "How much is {a} divided by {b}?", "Calculate {a} / {b}", "what is {a}/{b}", "{a} ÷ {b}",
    "What is {a} ÷ {b}?", "{a} / {b} = ?", "Work out {a} / {b}.", "Please divide {a} by {b}", "Solve {a} / {b}.",
    "What is {a} over {b}?", "How many times does {b} go into {a}?", "Evaluate {a} / {b}.", "What do you get if you divide {a} by {b}?",
    "Share {a} apples among {b} children. How many does each get?", "{a} pens go into {b} boxes. How many pens are in each box?",
    "{a} : {b}", "Tell me {a} / {b}", "{a} people sit at {b} tables. How many sit at each table?", "Do you know {a} / {b}?",
    "Can you divide {a} by {b}?", "How much is {a} / {b}?", "Tell me the quotient of {a} and {b}.", "Please work out {a} divided by {b}.",
    "What does {a} divided by {b} make?",
)  # fmt: skip
REMAINDER = (
    "What is {a} / {b} with remainder?", "Divide {a} by {b} with remainder.", "What is the remainder of {a} / {b}?", "{a} mod {b}",
    "What is {a} mod {b}?", "What remains when I divide {a} by {b}?", "{a} % {b}", "{a} divided by {b} with remainder",
    "Give me the remainder of {a} divided by {b}.", "Remainder of {a} and {b}?", "What is left over when {a} is divided by {b}?",
    "How much is {a} % {b}?",
)  # fmt: skip
THREE = (
    "What is {e}?", "{e}", "Compute {e}.", "What's {e}?", "Calculate {e}", "{e} = ?", "How much is {e}?", "Work out {e}.",
    "what is {e}", "Solve {e}.", "Evaluate {e}.", "Please compute {e}", "Result of {e}?", "{e} equals what?", "Do you know {e}?",
    "Can you work out {e}?", "Tell me what {e} is.", "Please work out {e} for me.",
)  # fmt: skip
NO_ZERO = "Nothing can be divided by zero."
_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
         "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def worked(draw: Draw, family: str, question: str, working: str, answer: str, aim: str = "") -> Dialogue:
    """A dialogue with its working in the analysis at every effort; ``aim``: precedes it at higher efforts."""
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family=family)
    dialogue.user(question[0].lower() + question[1:] if draw.chance(0.1) else question)
    if dialogue.effort == "low" or not aim:
        dialogue.think(working)
    elif dialogue.effort == "medium":
        dialogue.think(f"{aim} {working}".strip())
    else:
        dialogue.think(f"{aim} I work it out step by step. {working} I answer that.".strip())
    dialogue.say(answer)
    dialogue.answer = {"text": answer}
    return dialogue


# --------------------------------------------------------------------------- division


def long_division(a: int, b: int, places: int) -> tuple[str, str, int]:
    """Returns (steps, digits of the quotient with at most ``places`` decimals, remainder)."""
    steps, digits, rest = [], "", 0

    def step(partial: int) -> int:
        nonlocal digits
        digit = partial // b
        digits += str(digit)
        steps.append(f"{partial}: {digit}*{b}={digit * b}, rest {partial - digit * b}.")
        return partial - digit * b

    for at, figure in enumerate(str(a)):
        rest = rest * 10 + int(figure)
        if digits or rest >= b or at == len(str(a)) - 1:
            rest = step(rest)
    if rest and places:
        steps.append("Point.")
        digits += "."
        for _ in range(places):
            if rest:
                rest = step(rest * 10)
    return " ".join(steps), digits, rest


def quotient(a: int, b: int) -> tuple[str, str]:
    """Returns (working, result): exact with up to three decimals, else rounded to two."""
    steps, digits, rest = long_division(a, b, 3)
    if not rest:
        return f"{steps} So {a}/{b}={digits}.", digits
    cents = (a * 1000 // b + 5) // 10
    rounded = f"{cents // 100}.{cents % 100:02d}".rstrip("0").rstrip(".")
    return f"{steps} So {a}/{b} is {digits}, rounded {rounded}.", rounded


def _division_pair(draw: Draw) -> tuple[int, int]:
    while True:
        b = (
            draw.pick((25, 40, 50, 60, 75, 80, 90, 100))
            if draw.chance(0.08)
            else draw.integer(1, draw.pick((9, 12, 30)))
        )
        exact = draw.chance(0.65)
        a = b * draw.integer(0, min(999 // b, draw.pick((12, 30, 999)))) if exact else number(draw, 1000)
        if held_out(f"/{a},{b}") == (draw.split != "train"):
            return a, b


_PARTS = {
    2: "half",
    3: "third",
    4: "quarter",
    5: "fifth",
    6: "sixth",
    7: "seventh",
    8: "eighth",
    9: "ninth",
    10: "tenth",
    12: "twelfth",
    20: "twentieth",
    100: "hundredth",
}
_PART_OF = (
    "a {f} of {a}", "one {f} of {a}", "What is a {f} of {a}?", "What is one {f} of {a}?", "Give me a {f} of {a}", "How much is a {f} of {a}?", "{a}, and of that one {f}", "the {f} part of {a}", "I want one {f} of {a}", "Take a {f} of {a}.",
    "Calculate one {f} of {a}.", "a {f} of {a} is?", "a {f} of {a}, so {a}/{b}", "Find a {f} of {a}", "Tell me a {f} of {a}", "If I take a {f} of {a}?", "a {f} from {a}", "How many is a {f} of {a}?",
)  # fmt: skip
_GOODS = (
    "apples",
    "sweets",
    "euros",
    "books",
    "cards",
    "coins",
    "pens",
    "dollars",
    "cookies",
    "marbles",
    "nuts",
    "tickets",
    "hours",
    "balls",
    "seeds",
    "plates",
)
_OWNERS = (
    "people",
    "friends",
    "children",
    "boys",
    "girls",
    "teams",
    "guests",
    "pupils",
    "families",
    "workers",
    "groups",
    "dogs",
    "rooms",
    "bags",
    "tables",
    "classes",
)
_SHARED = (
    "Split {a} {g} between {b} {o}.", "Split {a} among {b} {o}.", "Split {a} {g} by {b}", "Divide {a} {g} among {b} {o}. How many each?", "{b} {o} share {a} {g}. How many does each one get?", "{a} shared by {b}", "{a} {g} shared by {b} {o}", "Share {a} between {b}",
    "{a} {g} for {b} {o}, how many each?", "{a} {g} per {b} {o}?", "If {b} {o} split {a} {g}, what does each get?", "{a} split {b} ways", "Cut {a} into {b} equal parts", "{a} in {b} equal parts", "How much does each get if {b} {o} share {a}?", "Distribute {a} {g} over {b} {o}.",
    "Give {a} {g} to {b} {o} fairly", "{a} {g} in {b} bags: how many in each?", "How many {g} per head, {a} for {b} {o}?", "{b} {o} get {a} {g} together; each gets?", "Deal {a} {g} to {b} {o}", "{b} {o} pay {a} {g} together. What is one share?", "Put {a} {g} in {b} rows",
    "{b} {o}, {a} {g}: each gets how many?",
)  # fmt: skip
_INTO = (
    "How often does {b} fit into {a}?", "How often does {b} go into {a}?", "How many times does {b} fit in {a}?", "How many {b}s are in {a}?", "How many times is {b} in {a}?", "{b} into {a}?", "{b} in {a} goes how often?", "How many {b}s make {a}?", "How often is {b} contained in {a}?",
    "How often can I subtract {b} from {a}?", "How many groups of {b} are in {a}?", "{b} times what is {a}?", "By what must I multiply {b} to get {a}?", "How many packs of {b} do I need for {a}?", "How many pieces of {b} fit {a}?", "{b} fits into {a} how often?",
    "How often fits {b} in {a}?", "How many lots of {b} are there in {a}?",
)  # fmt: skip


def _in_words(draw: Draw, a: int, b: int) -> str:
    """A division in words: a part of a number, shared things, how often one number fits into another."""
    kind = draw.rng.random()
    if b in _PARTS and kind < 0.5:
        asked = draw.phrase(_PART_OF).format(f=_PARTS[b], a=a, b=b)
        asked = (
            asked.replace("a half", draw.pick(("half", "half", "a half")))
            .replace("a eighth", "an eighth")
            .replace("the half part", "half")
        )
    elif kind < 0.75:
        asked = draw.phrase(_SHARED).format(a=a, b=b, g=draw.pick(_GOODS), o=draw.pick(_OWNERS))
    else:
        asked = draw.phrase(_INTO).format(a=a, b=b)
    return asked if draw.chance(0.4) else asked[0].upper() + asked[1:]


def division(draw: Draw) -> Dialogue:
    a, b = _division_pair(draw)
    if b > 1 and a > 0 and draw.chance(0.35):
        if draw.chance(0.45):
            b = draw.pick(tuple(part for part in _PARTS if part < 20))
            a = b * draw.integer(1, 999 // b)
            if held_out(f"/{a},{b}") != (draw.split != "train"):
                a, b = _division_pair(draw)
        working, result = quotient(a, max(b, 1))
        answer = f"{a} / {b} {'≈' if 'rounded' in working else '='} {result}"
        return worked(
            draw,
            "division",
            _in_words(draw, a, b),
            f"{a}/{b}. {working}",
            answer,
            f"The user wants {a} / {b}.",
        )
    if draw.chance(0.04):
        question = draw.phrase(DIVISION[:16]).format(a=a, b=0)
        return worked(draw, "division", question, "The divisor is 0.", NO_ZERO, f"The user wants {a} / 0.")
    if draw.chance(0.15):
        steps, digits, rest = long_division(a, b, 0)
        question = draw.phrase(REMAINDER).format(a=a, b=b)
        answer = f"{a} / {b} = {digits} remainder {rest}"
        return worked(
            draw,
            "division",
            question,
            f"{steps} So {digits} rest {rest}.",
            answer,
            f"The user wants {a} / {b} with remainder.",
        )
    working, result = quotient(a, b)
    is_rounded = "rounded" in working
    answer = f"{a} / {b} {'≈' if is_rounded else '='} {result}"
    return worked(
        draw,
        "division",
        draw.phrase(DIVISION).format(a=a, b=b),
        working,
        answer,
        f"The user wants {a} / {b}.",
    )


# --------------------------------------------------------------------------- three terms


def _apply(a: int, sign: str, b: int) -> tuple[int, str] | None:
    """Returns (result, working), or None if the numbers are too large for training."""
    if sign == "+":
        return (a + b, sum_working(a, b)) if 0 <= a + b < 1000 and a >= 0 else None
    if sign == "-":
        return (a - b, difference_working(a, b)) if a >= 0 and b < 1000 else None
    if sign == "*":
        return (a * b, product_working(a, b)) if min(a, b) >= 0 and max(a, b) <= 99 and a * b < 1000 else None
    if b == 0 or a < 0 or a % b:
        return None
    return a // b, quotient(a, b)[0]


def three_terms(draw: Draw) -> Dialogue:
    """ "2 + 3 * 4", "(2 + 3) * 4", "20 - 8 - 5": products and brackets first, else from left to right."""
    while True:
        made = _three(draw)
        if made is not None and held_out(f"three{made[0]}") == (draw.split != "train"):
            break
    expression, working, result = made
    shown = expression.replace("*", draw.pick(("*", "*", "*", "x", "×")))
    if draw.chance(0.25):
        shown = shown.replace(" ", "")
    spoken = shown
    if "(" not in shown and " " in shown and draw.chance(0.15):
        for sign, word in (
            ("+", "plus"),
            ("-", "minus"),
            ("*", "times"),
            ("x", "times"),
            ("×", "times"),
            ("/", "divided by"),
        ):
            spoken = spoken.replace(sign, word)
    question = draw.phrase(THREE).format(e=spoken)
    answer = f"{expression.replace('*', '×')} = {result}"
    return worked(draw, "three_terms", question, working, answer, f"The user wants {expression}.")


_PLAIN, _LEFT, _RIGHT = "a{0}b{1}c", "(a{0}b){1}c", "a{0}(b{1}c)"
_SHAPES = (
    *((_PLAIN, signs) for signs in ("+*", "+*", "+*", "-*", "-*", "*+", "*+", "*-", "*-", "++", "--", "+-", "-+", "**", "/+", "/-", "+/")),
    *((_LEFT, signs) for signs in ("+*", "-*")),
    *((_RIGHT, signs) for signs in ("*+", "*-")),
)  # fmt: skip


def _three(draw: Draw) -> tuple[str, str, int] | None:
    """Returns (expression, working, result), or None if the numbers are too large for training."""
    shape, (first, second) = draw.pick(_SHAPES)
    top, small = draw.pick((10, 20, 100)), draw.pick((10, 12, 20))
    limit = {"+": top, "-": top, "*": small, "/": small}
    a, b, c = (
        draw.integer(0, limit[first]),
        draw.integer(0, min(limit[first], limit[second])),
        draw.integer(0, limit[second]),
    )
    if first == "/":
        a *= b
    elif second == "/":
        b *= c
    left_first = shape == _LEFT or (shape == _PLAIN and not (first in "+-" and second in "*/"))
    why = "From the left:" if left_first else "Products first:"
    inner = _apply(a, first, b) if left_first else _apply(b, second, c)
    if inner is None:
        return None
    x, sign, y = (inner[0], second, c) if left_first else (a, first, inner[0])
    outer = _apply(x, sign, y)
    if outer is None:
        return None
    one = f"{a}{first}{b}" if left_first else f"{b}{second}{c}"
    why = (
        "Brackets first:"
        if shape != _PLAIN
        else "Quotient first:"
        if second == "/" and not left_first
        else why
    )
    names = {"a": str(a), "b": str(b), "c": str(c)}
    expression = "".join(names.get(sign, sign) for sign in shape.format(f" {first} ", f" {second} "))
    return expression, f"{why} {one}. {inner[1]} Then {x}{sign}{y}. {outer[1]}", outer[0]


# --------------------------------------------------------------------------- words and comparisons


def in_words(n: int) -> str:
    """Returns a number from 0 to 99 in words."""
    if n < 20:
        return _ONES[n]
    return _TENS[n // 10] + (f"-{_ONES[n % 10]}" if n % 10 else "")


def spoken(draw: Draw) -> Dialogue:
    """A question such as "What is seven times eight?"."""
    while True:
        sign, word = draw.pick((("+", "plus"), ("-", "minus"), ("*", "times"), ("/", "divided by")))
        top = 12 if sign in "*/" else draw.pick((10, 20, 99))
        a, b = draw.integer(0, top), draw.integer(1, top)
        a = a * b if sign == "/" else a
        if a < 100 and held_out(f"{sign}{a},{b}") == (draw.split != "train"):
            break
    result, working = _apply(a, sign, b) or (0, "")
    question = draw.phrase((
        "What is {a} {s} {b}?", "{a} {s} {b}", "How much is {a} {s} {b}?", "What's {a} {s} {b}?", "Calculate {a} {s} {b}.", "what is {a} {s} {b}",
        "Tell me {a} {s} {b}", "{a} {s} {b}?", "Work out {a} {s} {b}.", "What does {a} {s} {b} make?", "Please compute {a} {s} {b}.", "Do you know {a} {s} {b}?",
    )).format(a=in_words(a), b=in_words(b), s=word)  # fmt: skip
    shown = f"{a} {'×' if sign == '*' else sign} {b}"
    working = f"{in_words(a)} is {a}, {in_words(b)} is {b}. {working}"
    return worked(
        draw,
        "spoken",
        question[0].upper() + question[1:],
        working,
        f"{shown} = {result}",
        f"The user wants {shown}.",
    )


def compare(draw: Draw) -> Dialogue:
    """Comparisons: the larger of two, yes or no, even or odd."""
    while True:
        a, b = number(draw, 1000), number(draw, 1000)
        if draw.chance(0.3):
            b = max(0, a + draw.integer(-9, 9))
        if a != b and held_out(f"?{a},{b}") == (draw.split != "train"):
            break
    kind = draw.integer(0, 2)
    if kind == 0:
        question = draw.phrase(("Is {a} even or odd?", "Is {a} odd or even?", "even or odd: {a}", "Is the number {a} even or odd?", "{a}: even or odd?",
                                "Tell me whether {a} is even or odd.", "Would you say {a} is even or odd?")).format(a=a)  # fmt: skip
        return worked(
            draw,
            "compare",
            question,
            f"It ends in {a % 10}.",
            f"{a} is {'odd' if a % 2 else 'even'}.",
            f"The user asks about {a}.",
        )
    high, low = max(a, b), min(a, b)
    if kind == 1:
        larger = draw.chance(0.5)
        word = draw.pick(
            ("larger", "bigger", "greater", "higher") if larger else ("smaller", "lower", "less")
        )
        question = draw.phrase(("Which is {w}, {a} or {b}?", "What is {w}: {a} or {b}?", "Which number is {w}, {a} or {b}?", "{w}: {a} or {b}?", "which one is {w}, {a} or {b}",
                                "Is {a} or {b} {w}?", "Tell me which is {w}: {a} or {b}.")).format(w=word, a=a, b=b)  # fmt: skip
        wanted = high if larger else low
        return worked(
            draw,
            "compare",
            question[0].upper() + question[1:],
            f"{high} > {low}.",
            str(wanted),
            f"The user wants the {word} one.",
        )
    word, is_so = draw.pick(
        (("greater", a > b), ("larger", a > b), ("bigger", a > b), ("smaller", a < b), ("less", a < b))
    )
    question = draw.phrase(("Is {a} {w} than {b}?", "is {a} {w} than {b}", "Would {a} be {w} than {b}?", "{a} is {w} than {b}, right?",
                            "Tell me: is {a} {w} than {b}?", "Can you say whether {a} is {w} than {b}?")).format(w=word, a=a, b=b)  # fmt: skip
    answer = f"{'Yes' if is_so else 'No'}, {a} is {'' if is_so else 'not '}{word} than {b}."
    return worked(draw, "compare", question, f"{high} > {low}.", answer, f"The user compares {a} and {b}.")


# --------------------------------------------------------------------------- lists of numbers

_ASKED = {
    "largest": (
        "largest",
        "biggest",
        "highest",
        "greatest",
        "maximum",
        "max",
        "largest number",
        "biggest number",
        "biggest value",
        "top number",
        "maximum value",
        "highest value",
    ),
    "smallest": (
        "smallest",
        "lowest",
        "least",
        "minimum",
        "min",
        "smallest number",
        "lowest number",
        "minimum value",
        "smallest value",
        "tiniest",
    ),
    "sum": ("sum", "total"),
    "average": ("average", "mean"),
}


_LISTED = (
    "{w}: {x}", "{w}: {x}", "{x}: {w}?", "{x} - {w}?", "{w} in {x}", "{w} out of {x}", "{w} among {x}", "Among {x}, what is the {w}?", "Of {x}, which is the {w}?", "Of {x}, name the {w}", "Take the {w} from {x}", "Pick the {w} from {x}", "From {x} take the {w}",
    "Find me the {w}: {x}", "Find the {w} in {x}", "{w}({j})", "{w} of [{j}]", "{w} in [{j}]", "I have {x}. Which is the {w}?", "I have {x}. {w}?", "I got {x}. What is the {w}?", "Show the {w} of {x}", "Return the {w}: {x}", "Name the {w} of {x}", "Which number is the {w}: {x}",
    "Which one is the {w}? {x}", "The {w} here? {x}", "{w}? {x}", "What's the {w} in {x}", "Out of {x}, the {w} is?", "The {w} among {x} is which?", "Choose the {w}: {x}", "{x}. Say which is the {w}.", "Here is a list: {x}. Give the {w}.", "Look for the {w}: {x}", "What is {w} in {x}",
    "The {w}, please, of {x}", "Numbers {x}: which is the {w}?", "Select the {w} from {x}", "Given {x}, find the {w}", "Get the {w}: {x}", "In {x}, which is the {w}?", "tell me the {w}, {x}", "{w}, {x}", "list {x}, {w}?",
)  # fmt: skip
_TOTALLED = (
    "{w}: {x}", "{w} of these: {x}", "{x}: {w}?", "{x} - {w}?", "{w}({j})", "{w} of [{j}]", "I have {x}. What is the {w}?", "Give the {w}: {x}", "The {w} for {x}", "Show the {w} of {x}", "What {w} do {x} have?", "{w}? {x}", "Numbers {x}: the {w}?",
    "From {x}, the {w}", "Find the {w}: {x}", "Here are {x}. Give me the {w}.", "Work out the {w}: {x}", "Take {x} and give the {w}",
)  # fmt: skip


def _alike(draw: Draw) -> list[int]:
    """Returns numbers that are easily confused: the same digits in another order, or one digit different."""
    size, count = draw.pick((2, 3, 3)), draw.integer(3, 5)
    figures = [draw.integer(1, 9) for _ in range(draw.pick((2, size)))]
    near, made = draw.integer(20, 990), []
    for _ in range(count):
        made.append(
            near + draw.integer(-9, 9)
            if draw.chance(0.4)
            else int("".join(str(draw.pick((*figures, *figures, 0))) for _ in range(size)))
        )
    return made


def of_list(draw: Draw) -> Dialogue:
    """The largest, smallest, sum or average of a list of numbers."""
    kind = draw.pick(("largest", "largest", "smallest", "sum", "average"))
    top = draw.pick((20, 100, 1000) if kind in ("largest", "smallest") else (10, 20, 100))
    while True:
        size = draw.integer(2 if kind == "average" else 3, 7 if kind in ("largest", "smallest") else 5)
        items = [draw.integer(0, top - 1) for _ in range(size)]
        if kind in ("largest", "smallest"):
            items = _alike(draw) if draw.chance(0.4) else items
            items = list(dict.fromkeys(items))
        if len(items) > 1 and held_out(f"{kind}{items}") == (draw.split != "train"):
            break
    if kind == "sum" and draw.chance(0.35):
        question = draw.phrase(THREE).format(e=" + ".join(map(str, items)))
    else:
        question = _ask_list(draw, kind, items)
    working, answer = _list_working(kind, items)
    return worked(
        draw, "of_list", question, working, answer, f"The user wants the {kind} of {len(items)} numbers."
    )


def _ask_list(draw: Draw, kind: str, items: list[int]) -> str:
    joined = ", ".join(map(str, items))
    shown = draw.pick(
        (
            joined,
            joined,
            joined,
            f"[{joined}]",
            " ".join(map(str, items)),
            f"{', '.join(map(str, items[:-1]))} and {items[-1]}",
        )
    )
    word = draw.pick(_ASKED[kind])
    asks: tuple[str, ...] = (
        "What is the {w} of {x}?", "What is the {w} of these numbers: {x}", "Find the {w}: {x}", "The {w} of {x}", "{w} of {x}",
        "Give me the {w} of {x}.", "Which is the {w}: {x}" if kind in ("largest", "smallest") else "Compute the {w} of {x}",
        "What's the {w} of {x}?", "Tell me the {w} of these: {x}", "Find the {w} number in {x}" if kind in ("largest", "smallest") else "{w}: {x}",
        "Which of {x} is the {w}?" if kind in ("largest", "smallest") else "What is the {w} of the list {x}?",
        "Calculate the {w} of {x}", "The {w} of these, please: {x}", "What is the {w} in this list: {x}", "what is the {w} of {x}",
        "Can you tell me the {w} of {x}?", "From {x}, give me the {w}.", "I need the {w} of {x}.",
    )  # fmt: skip
    if draw.chance(0.45):
        asks = _LISTED if kind in ("largest", "smallest") else _TOTALLED
    if kind == "sum":
        asks = ("Add up {x}", "Add {x}.", "Sum up {x}", "Add these numbers: {x}", *asks)
    asked = draw.phrase(asks).format(w=word, x=shown, j=joined)
    return asked if draw.chance(0.4) else asked[0].upper() + asked[1:]


def _list_working(kind: str, items: list[int]) -> tuple[str, str]:
    if kind in ("largest", "smallest"):
        best, steps = items[0], [f"{items[0]}."]
        for one in items[1:]:
            better = one > best if kind == "largest" else one < best
            best = one if better else best
            steps.append(f"{one}: {best}.")
        return f"{' '.join(steps)} So {best}.", str(best)
    total, parts = items[0], []
    for one in items[1:]:
        parts.append(sum_working(total, one))
        total += one
    if kind == "sum":
        return " ".join(parts), f"{' + '.join(map(str, items))} = {total}"
    working, result = quotient(total, len(items))
    about = "about " if "rounded" in working else ""
    return f"{' '.join(parts)} {len(items)} numbers. {working}", f"The average is {about}{result}."
