"""Strings that sentences mention and schemas take: names, dates, times, addresses, codes, amounts."""

from __future__ import annotations

from collections.abc import Callable

from training.corpus.base import Draw


def phrase(draw: Draw) -> str:
    """Returns a name, a word, or a few words."""
    which = draw.rng.random()
    if which < 0.5:
        return draw.name()
    if which < 0.8:
        return draw.word()
    if which < 0.93:
        return " ".join(draw.words(draw.integer(2, 4)))
    return f"{draw.name()} {draw.word()}"


def marked(draw: Draw) -> str:
    """Returns a string with signs and digits: a date, a time, an address, a code or an amount."""
    number = draw.integer(0, 99)
    return str(draw.pick(_MARKED)(draw, number))


_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_UNITS = (
    "°C",
    " km",
    "%",
    " kg",
    " EUR",
    " degrees",
    " m/s",
    " minutes",
    " hours",
    "°F",
    "cm",
    "ms",
    " USD",
    " miles",
    "pm",
)


def iso_date(draw: Draw) -> str:
    return f"20{draw.integer(20, 39)}-{draw.integer(1, 12):02d}-{draw.integer(1, 28):02d}"


def clock(draw: Draw) -> str:
    return f"{draw.integer(0, 23):02d}:{draw.integer(0, 59):02d}"


def mail(draw: Draw) -> str:
    user = draw.word() if draw.chance(0.75) else f"{draw.word()}.{draw.word()}"
    return f"{user}@{draw.word()}.{draw.pick(('com', 'org', 'net', 'com', 'de', 'io'))}"


def capitals(draw: Draw, low: int = 3, high: int = 3) -> str:
    """Returns capital letters: the start of a word, or random ones."""
    size = draw.integer(low, high)
    if draw.chance(0.5):
        return draw.word().upper()[:size]
    return "".join(draw.rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=size))


def spoken_day(draw: Draw) -> str:
    month, day = draw.pick(_MONTHS), draw.integer(1, 28)
    ways = (
        f"{month} {day}", f"{day} {month}", f"{day} {month} 20{draw.integer(20, 39)}", f"{month} {day}, 20{draw.integer(20, 39)}",
        draw.pick(_DAYS), f"next {draw.pick(_DAYS)}", "tomorrow", "today", f"{day:02d}.{draw.integer(1, 12):02d}.20{draw.integer(20, 39)}",
    )  # fmt: skip
    return str(draw.pick(ways))


def spoken_time(draw: Draw) -> str:
    if draw.chance(0.5):
        return clock(draw)
    return f"{draw.integer(1, 12)}{draw.pick(('', f':{draw.integer(0, 59):02d}'))}{draw.pick((' am', ' pm', 'am', 'pm'))}"


_MARKED: tuple[Callable[[Draw, int], str], ...] = (
    lambda draw, _: iso_date(draw),
    lambda draw, _: iso_date(draw),
    lambda draw, _: clock(draw),
    lambda draw, _: clock(draw),
    lambda draw, _: mail(draw),
    lambda draw, _: mail(draw),
    lambda draw, _: f"{capitals(draw, 2, 4)}-{draw.integer(1, 999)}",
    lambda draw, _: f"{capitals(draw)}-{draw.integer(1, 99999)}",
    lambda draw, n: f"{n}{draw.pick(_UNITS)}",
    lambda draw, n: f"{n}{draw.pick(_UNITS)}",
    lambda draw, n: f"{draw.word()}, {n} {draw.word()}",
    lambda draw, n: f"{draw.pick('$€£')}{n}.{draw.integer(10, 99)}",
    lambda draw, n: f"${n}.{draw.integer(10, 99)}",
    lambda draw, _: spoken_day(draw),
    lambda draw, _: spoken_time(draw),
    lambda draw, n: f"{n} {draw.name()}",
    lambda draw, n: f"{draw.name()} {n}",
    lambda draw, n: f"{n} {draw.name()} {draw.pick(('Street', 'Road', 'Avenue', 'Lane', 'Square'))}",
    lambda draw, n: f"+{n} {draw.integer(10, 999)} {draw.integer(100, 999999)}",
    lambda draw, _: f"https://{draw.word()}.{draw.pick(('com', 'org'))}/{draw.word()}",
    lambda draw, _: f"{draw.word()}.{draw.pick(('pdf', 'txt', 'csv', 'py', 'json', 'md'))}",
    lambda draw, n: f"#{n}{draw.integer(0, 99)}",
    lambda draw, n: f"{n}.{draw.integer(0, 20)}.{draw.integer(0, 9)}",
    lambda draw, _: f"{draw.name()}-{draw.name()}",
    lambda draw, _: "".join(draw.rng.choices("abcdef0123456789", k=draw.integer(4, 8))),
    lambda draw, n: f"{draw.word()}{n}",
    lambda draw, n: f"{draw.word()}_{draw.word()}",
)
