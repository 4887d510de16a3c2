"""The engine process: lost clients and parents, SIGTERM, request ownership and privacy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from chorale.client.remote import RemoteClient
from chorale.client.wire.messages import (
    Abort,
    StepMessage,
    Submit,
    decode_from_engine,
    encode,
    engine_address,
)
from chorale.errors import ConfigError
from chorale.serve.bootstrap import EXIT_OK, EngineStart, check_directory, make_directory
from tests.support import PATIENCE
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import FAKE_ENGINE, collect, expected, request, rig, started, until


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_of_a_client_that_vanished_are_aborted(number: signal.Signals) -> None:
    """A killed client is noticed when a token cannot be sent, a stopped one by its silence."""
    async with rig(Behaviour(step_seconds=0.01), client_timeout=1.0) as r:
        command = [sys.executable, "-m", "tests.support.serve.lone_client", str(r.directory), "20"]
        lone = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert lone.stdout is not None
            assert await asyncio.wait_for(lone.stdout.readline(), PATIENCE) == b"running\n"
            await until(lambda: r.client.stats.num_running == 20, "its requests run")
            mine = request("mine", 250)
            answer = asyncio.ensure_future(collect(r.client.submit(mine)))
            lone.send_signal(number)
            took = await until(lambda: r.client.stats.num_running <= 1, "its requests are aborted")
            assert took < 30.0  # the requests would take 500 s
            assert await answer == {0: (expected(mine), "length")}
            await r.is_empty()
            assert r.client.stats.kv_blocks_used == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                lone.kill()
            await lone.communicate()


async def test_sigterm_lets_running_requests_finish() -> None:
    with make_directory() as directory:
        process = await spawn_engine(directory, Behaviour(step_seconds=0.01))
        async with started(RemoteClient(directory)) as client:
            await until(lambda: client.status.state == "ready", "ready")
            asked = request("r", 60)
            stream = client.submit(asked)
            tokens = [t for c in await anext(stream) for t in c.token_ids]
            process.terminate()
            await until(lambda: client.status.state == "draining", "draining is shown")
            tokens += (await collect(stream))[0][0]
            assert tokens == expected(asked)
            assert await asyncio.wait_for(process.wait(), PATIENCE) == EXIT_OK


async def spawn_engine(directory: Path, behaviour: Behaviour) -> asyncio.subprocess.Process:
    start = EngineStart(directory=str(directory), config=behaviour.encode(), parent_pid=os.getpid())
    process = await asyncio.create_subprocess_exec(*FAKE_ENGINE, stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.msgpack.encode(start))
    process.stdin.close()
    return process


def listening_inodes(pid: int) -> set[str]:
    """Returns the inodes of the listening TCP sockets (IPv4 and IPv6) of a process."""
    listening = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening.add(f"socket:[{fields[9]}]")
    opened = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            opened.add(os.readlink(entry))
        except FileNotFoundError:
            continue
    return listening & opened


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_sockets_and_configuration_are_private_to_the_user() -> None:
    async with rig() as r:
        assert listening_inodes(r.pid) == set()
        assert stat.S_IMODE(r.directory.stat().st_mode) == 0o700
        assert {p.name for p in r.directory.iterdir()} == {"engine", "beats"}
        assert all(stat.S_ISSOCK(p.stat().st_mode) for p in r.directory.iterdir())
        arguments = Path(f"/proc/{r.pid}/cmdline").read_bytes().split(b"\0")
        assert arguments[1:] == [FAKE_ENGINE[1].encode(), b""]  # the configuration is not in argv


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    check_directory(tmp_path)
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigError, match="0700"):
        check_directory(tmp_path)


async def test_garbage_on_the_socket_is_dropped() -> None:
    async with rig() as r:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(engine_address(r.directory))
            for data in (b"", b"\xc1", b"\x93\x01\x02\x03", os.urandom(1000)):
                stranger.send(data)
            stranger.send_multipart([b"two", b"parts"])
            asked = request("r")
            assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}
        assert r.monitor.num_restarts == 0


async def test_a_client_cannot_abort_or_take_over_requests_of_another() -> None:
    """API processes choose request ids, and must not abort a request, or a choice, of another process."""
    async with rig(Behaviour(step_seconds=0.005)) as r:
        mine = request("mine", 200, n=2)
        stream = r.client.submit(mine)
        chunks = await anext(stream)
        with zmq.Context() as context, context.socket(zmq.DEALER) as other:
            other.setsockopt(zmq.LINGER, 0)
            other.connect(engine_address(r.directory))
            other.send(encode(Abort(["mine"], 0)))
            other.send(encode(Abort(["mine"])))
            other.send(encode(Submit(r.client.info.engine_id, request("theirs", 3))))
            assert await asyncio.to_thread(other.poll, 30_000)  # both aborts have been handled before
        found = {index: [t for c in chunks if c.index == index for t in c.token_ids] for index in (0, 1)}
        for index, (tokens, reason) in (await asyncio.wait_for(collect(stream), PATIENCE)).items():
            assert (found[index] + tokens, reason) == (expected(mine, index), "length")


async def test_the_id_of_a_request_that_has_ended_may_be_used_again() -> None:
    """Any client may use it: the engine forgets the owner when the last choice ends."""
    async with rig() as r, started(RemoteClient(r.directory)) as other:
        await until(lambda: other.status.state == "ready", "the second client is ready")
        for client in (r.client, other, r.client):
            asked = request("same", 5, n=2)
            answer = {index: (expected(asked, index), "length") for index in (0, 1)}
            assert await collect(client.submit(asked)) == answer


async def test_a_request_meant_for_an_engine_that_died_is_not_run() -> None:
    async with rig() as r:
        with zmq.Context() as context, context.socket(zmq.DEALER) as late:
            late.setsockopt(zmq.LINGER, 0)
            late.connect(engine_address(r.directory))
            late.send(encode(Submit("an-older-engine", request("stale", 3))))
            late.send(encode(Submit(r.client.info.engine_id, request("fresh", 3))))
            seen = set[str]()
            while "fresh" not in seen:
                assert await asyncio.to_thread(late.poll, 10_000)
                message = decode_from_engine(late.recv())
                assert isinstance(message, StepMessage)
                seen |= {chunk.request_id for chunk in message.step.chunks}
            assert seen == {"fresh"}
