"""PDF files are read in a process with limits, and whatever is in them ends as text or as a 400."""

from __future__ import annotations

import asyncio
import random
import zlib

import pytest

from chorale.errors import QueueFullError, RequestError
from chorale.tools.pdf import reader
from chorale.tools.pdf.child import LIMITS, Limits
from chorale.tools.pdf.reader import PdfReader
from tests.support.fuzz.worst_input import watched
from tests.support.tools.pdf import pdf

pytest.importorskip("pypdf")

# 12 million operators in 200 kB.
COSTLY = pdf(stream=zlib.compress(b"BT /F1 9 Tf (a) Tj ET " * 3_000_000, 9), filters=b"/Filter /FlateDecode")
_KEYS = (b"41" * 32, b"42" * 32)
SECRET = b"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >> /ID [<00> <00>] /Root" % _KEYS


async def error(data: bytes, limits: Limits = LIMITS) -> str:
    with pytest.raises(RequestError) as caught:
        await PdfReader(limits).text(data, "input[0].content[0].file_data")
    assert (caught.value.status, caught.value.code) == (400, "invalid_file")
    assert caught.value.param == "input[0].content[0].file_data"
    return caught.value.message


async def test_the_text_of_all_pages_is_read() -> None:
    assert await PdfReader().text(pdf("Hello", "World"), "p") == "Hello\n\nWorld"


@pytest.mark.parametrize(
    "data",
    [
        b"%PDF-1.7\n" + bytes(range(256)) * 8,
        b"%PDF-1.4\n" + b"<<" * 100_000,
        pdf("a").replace(b"/Kids [4 0 R]", b"/Kids [2 0 R]"),
        pdf("a").replace(b"/Root", SECRET),
        pdf(""),
        pdf("a")[:-200],
    ],
    ids=["noise", "nested", "loop", "encrypted", "no text", "cut off"],
)
async def test_a_bad_file_is_refused(data: bytes) -> None:
    await error(data)


@pytest.mark.parametrize(
    ("data", "limits", "word"),
    [
        (pdf("a", "b", "c"), Limits(pages=2), "pages"),
        (pdf("abcdef", "abcdef"), Limits(characters=10), "characters"),
        (pdf("a") + b" " * reader.MAX_BYTES, Limits(), "bytes"),
        (COSTLY, Limits(memory_bytes=100 * 2**20), "memory"),
    ],
)
async def test_a_file_beyond_a_limit_is_refused(data: bytes, limits: Limits, word: str) -> None:
    assert word in await error(data, limits)


async def test_a_costly_file_is_given_up_and_the_server_goes_on() -> None:
    async with watched() as cost:
        assert "long" in await error(COSTLY, Limits(cpu_seconds=1))
        cost.num_bytes = len(COSTLY)
    cost.check(max_cpu_seconds=1.0)


async def test_mutated_files_are_read_or_refused() -> None:
    source, mutate, pdfs = pdf("Hello", "World"), random.Random(5), PdfReader()

    def mutated() -> bytes:
        data = bytearray(source)
        for _ in range(mutate.randint(1, 30)):
            data[mutate.randrange(9, len(data))] = mutate.randrange(256)
        return bytes(data)

    found = await asyncio.gather(*(pdfs.text(mutated(), "p") for _ in range(12)), return_exceptions=True)
    assert {type(each) for each in found} <= {str, RequestError}
    assert {each.code for each in found if isinstance(each, RequestError)} <= {"invalid_file"}


async def test_a_request_that_leaves_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = asyncio.create_subprocess_exec

    async def noting(*argv: str, **options: object) -> asyncio.subprocess.Process:
        started.append(await start(*argv, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noting)
    reading = asyncio.create_task(PdfReader().text(COSTLY, "p"))
    while not started:
        await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert started[0].returncode is not None


async def test_too_many_waiting_files_are_a_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_WAITING", 1)
    pdfs = PdfReader()
    first = asyncio.create_task(pdfs.text(pdf("a"), "p"))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await pdfs.text(pdf("b"), "p")
    assert await first == "a"
