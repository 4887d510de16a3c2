"""Sums, differences and products of small whole numbers, worked out by place in the analysis.

low: the shortest working that makes the answer reliable, since the model cannot see the result at a glance;
medium: names units, tens and hundreds; high: works and checks.
"""

from __future__ import annotations

from training.corpus.base import Dialogue, Draw, held_out

SUM = (
    "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "Add {a} and {b}.", "What's {a} plus {b}?", "Compute {a} + {b}.",
    "Please add {a} to {b}.", "How much is {a} plus {b}?", "{a} plus {b} equals what?", "Calculate {a} + {b}",
    "Can you add {a} and {b} for me?", "what is {a}+{b}", "Give me the sum of {a} and {b}.", "sum {a} {b}",
    "{a} + {b} = ?", "I have {a} apples and get {b} more. How many apples do I have?", "What is the sum of {a} and {b}?",
    "Tell me what {a} and {b} make together.", "What do you get if you add {b} to {a}?", "Work out {a} + {b}.",
    "How many are {a} and {b}?", "Sum up {a} and {b}", "what does {a} + {b} make", "Solve {a} + {b}.", "{a} plus {b}",
    "There are {a} birds and {b} more come. How many birds are there?", "Evaluate {a} + {b}.", "{a} + {b} equals?",
    "Do you know {a} + {b}?", "What is {a} and {b} together?",
    "Could you add {a} to {b}?", "Tell me the sum of {a} and {b}.", "How much is {a} + {b}?", "Please work out {a} plus {b}.",
    "What does {a} plus {b} make?",
)  # fmt: skip
DIFFERENCE = (
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "Subtract {b} from {a}.", "What's {a} minus {b}?",
    "Compute {a} - {b}.", "How much is {a} minus {b}?", "Calculate {a} - {b}", "Take {b} away from {a}.",
    "{a} - {b} = ?", "What is left if I take {b} from {a}?", "what is {a}-{b}", "Work out {a} - {b}.", "{a} minus {b}",
    "What is the difference of {a} and {b}?", "I have {a} apples and give {b} away. How many are left?", "Solve {a} - {b}.",
    "Evaluate {a} - {b}.", "what does {a} - {b} make", "Can you subtract {b} from {a}?", "Take {b} from {a}",
    "How much is {a} - {b}?", "Please work out {a} minus {b}.", "Could you subtract {b} from {a}?", "Do you know {a} - {b}?",
)  # fmt: skip
PRODUCT = (
    "What is {a} * {b}?", "{a} * {b}", "{a}*{b}", "Multiply {a} by {b}.", "What's {a} times {b}?",
    "What is {a} x {b}?", "Compute {a} × {b}.", "How much is {a} times {b}?", "Calculate {a} * {b}",
    "{a} times {b}", "{a} x {b} = ?", "Give me the product of {a} and {b}.", "what is {a}*{b}", "Multiply {a} and {b}",
    "What is {a} multiplied by {b}?", "Work out {a} * {b}.", "What is the product of {a} and {b}?", "multiply {a} with {b}",
    "There are {a} boxes with {b} pens each. How many pens are there?", "Solve {a} * {b}.", "Evaluate {a} * {b}.",
    "What do you get if you multiply {a} by {b}?", "what does {a} times {b} make", "{a} multiplied by {b}", "product {a} {b}",
    "Can you multiply {a} and {b}?", "Compute {a} * {b}.", "{a} * {b} = ?", "What is {a} × {b}?", "Calculate {a} times {b}",
    "Could you multiply {a} by {b}?", "Tell me the product of {a} and {b}.", "How much is {a} * {b}?",
    "Please work out {a} times {b}.", "Multiply {a} and {b} for me.", "Do you know {a} * {b}?",
)  # fmt: skip


def places(n: int) -> tuple[int, int, int]:
    return n // 100, n // 10 % 10, n % 10


def sum_working(a: int, b: int) -> str:
    """Returns the working by units, tens and hundreds with carries; every step adds one pair of digits."""
    (ah, at, au), (bh, bt, bu) = places(a), places(b)
    units = au + bu
    tens = at + bt + units // 10
    text = f"Units {au}+{bu}={units}."
    if max(a, b) >= 10 or units >= 10:
        text += f" Tens {at}+{bt}+{units // 10}={tens}."
    if max(a, b) >= 100 or tens >= 10:
        text += f" Hundreds {ah}+{bh}+{tens // 10}={ah + bh + tens // 10}."
    return f"{text} So {a}+{b}={a + b}."


def difference_working(a: int, b: int) -> str:
    """Returns the working of larger minus smaller by place, with borrows; the sign comes last."""
    big, small = max(a, b), min(a, b)
    text = "" if a >= b else f"{b} is larger, so the result is negative. "
    (h, t, u), (sh, st, su) = places(big), places(small)
    borrow = int(u < su)
    text += f"Units {u + 10 * borrow}-{su}={u + 10 * borrow - su}."
    if big >= 10:
        left = t - borrow
        borrow_tens = int(left < st)
        text += f" Tens {left + 10 * borrow_tens}-{st}={left + 10 * borrow_tens - st}."
        if big >= 100:
            text += f" Hundreds {h - borrow_tens}-{sh}={h - borrow_tens - sh}."
    return f"{text} So {a}-{b}={a - b}."


def product_working(a: int, b: int) -> str:
    """Returns the working of a * b by the tens and units of the smaller number."""
    big, small = max(a, b), min(a, b)
    if small < 10:
        if big < 10:
            return f"{a}*{b}={a * b}."
        tens, units = big // 10 * 10, big % 10
        return f"{small}*{tens}={small * tens}. {small}*{units}={small * units}. Together {big * small}."
    tens, units = small // 10 * 10, small % 10
    bt, bu = big // 10 * 10, big % 10
    rows = (
        f"{big}*{tens}: {bt}*{tens}={bt * tens}, {bu}*{tens}={bu * tens}, so {big * tens}. "
        f"{big}*{units}: {bt}*{units}={bt * units}, {bu}*{units}={bu * units}, so {big * units}."
    )
    return f"{rows} {sum_working(big * tens, big * units)}"


def number(draw: Draw, top: int) -> int:
    """Returns a number; each number of digits is equally likely, so that small numbers are trained, too."""
    digits = draw.integer(1, len(str(top - 1)))
    return draw.integer(0 if digits == 1 else 10 ** (digits - 1), min(10**digits, top) - 1)


def pair(draw: Draw, top: int, kind: str) -> tuple[int, int]:
    """Returns two numbers. The evaluation's pairs (one in twelve) never occur in training."""
    while True:
        a, b = (draw.integer(0, top - 1), draw.integer(0, top - 1)) if draw.chance(0.6) else (
            number(draw, top), number(draw, top))  # fmt: skip
        if held_out(f"{kind}{a},{b}") == (draw.split != "train"):
            return a, b


def sums(draw: Draw) -> Dialogue:
    a, b = pair(draw, 1000, "+")
    return _solve(draw, SUM, a, b, "+", a + b, sum_working(a, b), f"Check: {a + b}-{b}={a}. Good.")


def differences(draw: Draw) -> Dialogue:
    a, b = pair(draw, 1000, "-")
    if draw.chance(0.65):
        a, b = max(a, b), min(a, b)
    return _solve(
        draw, DIFFERENCE, a, b, "-", a - b, difference_working(a, b), f"Check: {a - b}+{b}={a}. Good."
    )


def products(draw: Draw) -> Dialogue:
    a, b = pair(draw, 30, "*")
    check = f"Check: {b}*{a}={a * b} as well. Good."
    return _solve(draw, PRODUCT, a, b, "*", a * b, product_working(a, b), check)


def _solve(
    draw: Draw, phrasings: tuple[str, ...], a: int, b: int, sign: str, result: int, working: str, check: str
) -> Dialogue:
    dialogue = Dialogue(
        draw,
        effort=draw.pick(("low", "medium", "high")),
        family={"+": "sum", "-": "difference", "*": "product"}[sign],
    )
    asked = str(draw.phrase(phrasings)).format(a=a, b=b)
    dialogue.user(asked[0].lower() + asked[1:] if draw.chance(0.1) else asked)
    if dialogue.effort == "low":
        dialogue.think(working)
    elif dialogue.effort == "medium":
        dialogue.think(f"The user wants {a} {sign} {b}. {working}")
    else:
        dialogue.think(
            f"The user wants {a} {sign} {b}. I work it out step by step. {working} {check} I answer {result}."
        )
    shown = f"{a} {'×' if sign == '*' else sign} {b}"
    dialogue.say(f"{shown} = {result}")
    dialogue.answer = {"result": result}
    return dialogue


def follow_up(draw: Draw) -> Dialogue:
    """A question that builds on an earlier answer: "and plus 5?"."""
    a, b = pair(draw, 400, "+")
    c = draw.integer(1, 99)
    dialogue = Dialogue(draw, effort=draw.pick(("low", "medium", "high")), family="follow_up")
    dialogue.user(draw.phrase(SUM[:14]).format(a=a, b=b)).past_answer(f"{a} + {b} = {a + b}")
    asks = (
        "And plus {c}?",
        "Now add {c}.",
        "Add {c} to that.",
        "plus {c}?",
        "And if I add {c} more?",
        "And {c} more?",
        "Add another {c}.",
        "now plus {c}",
        "Then add {c} to it.",
        "plus another {c}",
        "And what if I add {c}?",
        "+ {c}",
        "What is that plus {c}?",
        "Add {c} more.",
        "Please add {c} to the result.",
        "Now add {c} to that.",
        "And plus another {c}?",
        "Then plus {c}.",
    )
    dialogue.user(draw.phrase(asks).format(c=c))
    total = a + b
    prefix = "" if dialogue.effort == "low" else f"The last result is {total}. "
    dialogue.think(f"{prefix}{sum_working(total, c)}" + (" Good." if dialogue.effort == "high" else ""))
    dialogue.say(f"{total} + {c} = {total + c}")
    dialogue.answer = {"result": total + c}
    return dialogue
