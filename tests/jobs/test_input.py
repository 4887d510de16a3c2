"""The input of a batch: its lines, however the pieces are cut, and the check of a large file."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator

import pytest

from chorale.jobs.input import MAX_FAULTS, LineTooLongError, inspect, split_lines
from tests.support.fuzz.worst_input import Cost, watched

ENDPOINT = "/v1/completions"


def line(number: int, **body: object) -> bytes:
    made = {"custom_id": f"n{number}", "method": "POST", "url": ENDPOINT, "body": {"prompt": "x", **body}}
    return json.dumps(made).encode()


async def cut(data: bytes, *ends: int) -> AsyncGenerator[bytes]:
    for start, end in zip((0, *ends), (*ends, len(data)), strict=True):
        yield data[start:end]


async def numbered(data: bytes, *ends: int, max_bytes: int = 100) -> list[tuple[int, bytes]]:
    return [each async for found in split_lines(cut(data, *ends), max_bytes) for each in found]


def test_lines_do_not_depend_on_how_pieces_are_cut() -> None:
    data = b"\xef\xbb\xbfone\n\n  \r\ntwo\r\n" + "drei ü".encode() + b"\n\nlast"
    rng = random.Random(2)
    expected = [(1, b"one"), (4, b"two\r"), (5, "drei ü".encode()), (7, b"last")]
    assert asyncio.run(numbered(data)) == expected
    for _ in range(200):
        ends = sorted(rng.sample(range(4, len(data)), rng.randrange(8)))
        assert asyncio.run(numbered(data, *ends)) == expected


def test_a_line_without_end_is_refused_before_it_is_held() -> None:
    for data in (b"a\n" + b"x" * 300, b"a\n" + b"x" * 101 + b"\nb"):
        with pytest.raises(LineTooLongError) as caught:
            asyncio.run(numbered(data, *range(50, len(data), 50)))
        assert caught.value.line == 2


@pytest.mark.parametrize(
    ("pattern", "code"),
    [(b"\n", "empty_file"), (b"\r\n", "empty_file"), (b" \n", "empty_file"), (b"{}\n", "too_many_tasks")],
)
def test_hostile_files_are_checked_in_linear_time(pattern: bytes, code: str) -> None:
    async def check(num_bytes: int) -> Cost:
        data = pattern * (num_bytes // len(pattern))
        async with watched() as cost:
            found = await inspect(cut(data, *range(2**20, len(data), 2**20)), ENDPOINT, **LIMITS)
        assert found.faults[-1]["code"] in (code, "missing_required_parameter")
        cost.num_bytes = len(data)
        return cost

    asyncio.run(check(2**20))  # the first call makes the threads
    # 50,000 lines with a fault each and a million blank ones took 0.1 s.
    asyncio.run(check(16 * 2**20)).check(max_cpu_seconds=1.0)


def test_no_more_lines_are_parsed_than_are_allowed() -> None:
    async def main() -> int:
        found = await inspect(cut(b"{}\n" * 100_000), ENDPOINT, max_lines=1000, max_bytes=100)
        assert found.faults[-1]["code"] == "missing_required_parameter"
        return found.num_lines

    assert 1000 < asyncio.run(main()) < 1500


def test_the_model_is_that_of_all_lines_and_faults_are_bounded() -> None:
    async def main() -> None:
        same = await inspect(cut(line(1, model="m") + b"\n" + line(2, model="m")), ENDPOINT, **LIMITS)
        assert (same.num_lines, same.model, same.faults) == (2, "m", [])
        mixed = await inspect(cut(line(1, model="m") + b"\n" + line(2)), ENDPOINT, **LIMITS)
        assert mixed.model is None
        bad = await inspect(cut(b"{\n" * 1000), ENDPOINT, **LIMITS)
        assert (bad.num_lines, len(bad.faults)) == (1000, MAX_FAULTS)

    asyncio.run(main())


LIMITS = {"max_lines": 50_000, "max_bytes": 2**20}


def test_the_check_of_a_large_file_leaves_the_event_loop_free() -> None:
    data = b"\n".join(line(number, prompt="x" * 400) for number in range(20_000))

    async def main() -> None:
        checking = asyncio.create_task(
            inspect(cut(data, *range(2**20, len(data), 2**20)), ENDPOINT, **LIMITS)
        )
        times = []
        while not checking.done():
            started = time.perf_counter()
            await asyncio.sleep(0)
            times.append(time.perf_counter() - started)
            await asyncio.sleep(0.001)
        assert (await checking).num_lines == 20_000
        late = sorted(times)[len(times) * 9 // 10]
        assert late < 0.05, f"{late:.3f} s"  # in one piece the check takes most of a second

    asyncio.run(main())
