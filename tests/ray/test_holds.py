"""Calls that last as long as the requests of a front (needs no Ray)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from chorale.client.fleet.members import Ticket
from chorale.client.wire.curve import new_keys
from chorale.serve.fleet.assigner import RayAssigner
from chorale.serve.fleet.holds import EARLY, Ended, HoldClient, HoldServer
from tests.support import PATIENCE
from tests.support.serve.harness import request, until


async def test_a_call_ends_with_its_request_even_if_the_end_arrives_first() -> None:
    public, secret = new_keys()
    server, client = HoldServer("127.0.0.1", secret), HoldClient()
    server.start()
    client.start()
    client.connect("r0", server.endpoint, public)
    calls = [asyncio.ensure_future(server.hold(client.front, name)) for name in ("a", "b", "c")]
    stranger = asyncio.ensure_future(server.hold("another front", "a"))
    await asyncio.sleep(0)
    client.ended("r0", "a")
    client.ended("r0", "b")
    client.ended("r0", "late")
    await asyncio.wait_for(asyncio.gather(*calls[:2]), PATIENCE)
    assert [call.done() for call in (*calls, stranger)] == [True, True, False, False]
    await until(lambda: server._early, "the early end")
    await asyncio.wait_for(server.hold(client.front, "late"), PATIENCE)
    assert server.num_held == 2
    for call in (calls[2], stranger):
        call.cancel()
    await asyncio.gather(calls[2], stranger, return_exceptions=True)
    assert server.num_held == 0
    client.close()
    server.close()


async def test_the_calls_of_a_silent_front_end_and_those_of_others_continue() -> None:
    now = [100.0]
    server = HoldServer("127.0.0.1", new_keys()[1], 2.0, clock=lambda: now[0])
    gone = asyncio.ensure_future(server.hold("gone", "a"))
    alive = asyncio.ensure_future(server.hold("alive", "a"))
    await asyncio.sleep(0)
    server.receive(Ended("gone", ["x"]))  # its call never arrives
    now[0] += 600  # the replica was suspended
    server.tick()
    await asyncio.sleep(0)
    assert not gone.done()
    for _ in range(8):
        now[0] += 0.5
        server.receive(Ended("alive"))
        server.tick()
    await asyncio.wait_for(gone, PATIENCE)
    assert not alive.done()
    now[0] += EARLY
    server.receive(Ended("alive"))
    server.tick()
    assert not server._early
    alive.cancel()
    server._socket.close()
    server._context.term()


async def test_a_client_with_another_key_cannot_end_calls() -> None:
    _, secret = new_keys()
    server, client = HoldServer("127.0.0.1", secret), HoldClient()
    server.start()
    client.start()
    client.connect("r0", server.endpoint, new_keys()[0])
    call = asyncio.ensure_future(server.hold(client.front, "a"))
    await asyncio.sleep(0)
    client.ended("r0", "a")
    await asyncio.sleep(0.3)
    assert not call.done()
    call.cancel()
    client.close()
    server.close()


async def test_an_end_can_be_sent_to_every_engine() -> None:
    public, secret = new_keys()
    servers, client = [HoldServer("127.0.0.1", secret) for _ in range(2)], HoldClient()
    client.start()
    for index, server in enumerate(servers):
        server.start()
        client.connect(f"r{index}", server.endpoint, public)
    call = asyncio.ensure_future(servers[1].hold(client.front, "a"))
    await asyncio.sleep(0)
    client.ended_anywhere("a")
    await asyncio.wait_for(call, PATIENCE)
    client.keep({"r1"})
    assert list(client._sockets) == ["r1"]
    client.close()
    for server in servers:
        server.close()


async def test_a_request_is_assigned_to_the_replica_that_accepted_its_call() -> None:
    """The handle stands in for Ray's: a call of ``hold`` lasts until it is cancelled."""
    calls: list[asyncio.Future[Any]] = []

    def hold(name: str, front: str) -> asyncio.Future[Any]:
        calls.append(asyncio.get_running_loop().create_future())
        return calls[-1]

    handle: Any = SimpleNamespace(hold=SimpleNamespace(remote=hold))
    assigner, ticket = RayAssigner(handle, None), Ticket(request("a"))  # type: ignore[arg-type]
    assigner.start()
    assigned = asyncio.ensure_future(assigner.assign(ticket))
    await asyncio.sleep(0)
    assert assigner.ticket("a") is ticket
    assigner.routed("a", "r1")
    await asyncio.wait({assigned}, timeout=10)
    assert assigned.done()
    assert assigned.result() == "r1"
    assigner.ended(ticket)
    assert assigner.ticket("a") is None
    calls[0].set_result(None)
    await assigner.close()
