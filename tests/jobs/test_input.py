"""The input of a batch: splitting pieces into lines, and checking a large file."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator

import pytest

from chorale.jobs.input import Inspection, split_lines
from chorale.jobs.line import LineError
from tests.support.fuzz.worst_input import Cost, check_best, watched

ENDPOINT = "/v1/completions"


def line(number: int, **body: object) -> bytes:
    made = {"custom_id": f"n{number}", "method": "POST", "url": ENDPOINT, "body": {"prompt": "x", **body}}
    return json.dumps(made).encode()


async def cut(data: bytes, *ends: int) -> AsyncGenerator[bytes]:
    for start, end in zip((0, *ends), (*ends, len(data)), strict=True):
        yield data[start:end]


async def numbered(data: bytes, *ends: int, max_bytes: int = 100) -> list[tuple[int, bytes]]:
    return [each async for found in split_lines(cut(data, *ends), max_bytes) for each in found]


async def test_lines_do_not_depend_on_how_pieces_are_cut() -> None:
    data = b"\xef\xbb\xbfone\n\n  \r\ntwo\r\n" + "drei ü".encode() + b"\n\nlast"
    rng = random.Random(2)
    expected = [(1, b"one"), (4, b"two\r"), (5, "drei ü".encode()), (7, b"last")]
    assert await numbered(data) == expected
    for _ in range(200):
        ends = sorted(rng.sample(range(4, len(data)), rng.randrange(8)))
        assert await numbered(data, *ends) == expected


async def test_a_line_that_is_too_long_is_cut() -> None:
    for long in (b"x" * 101, b"x" * 300, b" " * 300):
        for data in (b"a\n" + long + b"\nb", b"a\n" + long):
            (_, (number, kept), *rest) = await numbered(data, *range(50, len(data), 50))
            assert number == 2
            assert 100 < len(kept) <= 151  # still too long for ``parse_line``
            assert rest == ([(3, b"b")] if data.endswith(b"b") else [])


async def inspected(data: bytes) -> tuple[Inspection, list[tuple[int, LineError]]]:
    found = Inspection((ENDPOINT,), 2**20)
    pieces = cut(data, *range(2**20, len(data), 2**20))
    return found, [fault async for faults in found.read(pieces) for fault in faults]


@pytest.mark.parametrize("pattern", [b"\n", b"\r\n", b" \n", b"{}\n"])
async def test_hostile_files_are_checked_in_linear_time(pattern: bytes) -> None:
    async def check(num_bytes: int) -> Cost:
        data = pattern * (num_bytes // len(pattern))
        async with watched() as cost:
            found = Inspection((ENDPOINT,), 2**20)
            async for _ in found.read(cut(data, *range(2**20, len(data), 2**20))):
                if found.num_lines > 50_000:  # most lines of a batch
                    break
        cost.num_bytes = len(data)
        return cost

    await check(2**20)  # the first call starts the threads
    # 50,000 lines with a fault each and a million blank ones took 0.1 s.
    await check_best(lambda: check(16 * 2**20), max_cpu_seconds=1.0)


async def test_a_model_is_found_only_if_all_lines_name_it() -> None:
    for second, model in (({"model": "m"}, "m"), ({}, None), ({"model": "n"}, None)):
        found, faults = await inspected(line(1, model="m") + b"\n" + line(2, **second))
        assert (found.num_lines, found.model, faults) == (2, model, [])


async def test_the_check_of_a_large_file_leaves_the_event_loop_free() -> None:
    data = b"\n".join(line(number, prompt="x" * 400) for number in range(20_000))

    checking = asyncio.create_task(inspected(data))
    times = []
    while not checking.done():
        started = time.perf_counter()
        await asyncio.sleep(0)
        times.append(time.perf_counter() - started)
        await asyncio.sleep(0.001)
    assert (await checking)[0].num_lines == 20_000
    late = sorted(times)[len(times) * 9 // 10]
    assert late < 0.05, f"{late:.3f} s"  # the whole check takes most of a second
