"""Random operations on the store, compared with a model: transitions, leases, totals, no orphaned rows."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chorale.api.responses.event_log import TurnBegan, TurnFailed
from chorale.ids import new_id
from chorale.store.protocol import ConversationLockedError, Lease, StoredItem, StoredResponse, StoreError
from chorale.store.responses import ROW_BYTES
from chorale.store.store import SqliteStore
from tests.store.test_background import events, queued
from tests.store.test_store import make

SERVERS = ("srv_a", "srv_b")
PICK = st.integers(0, 10**6)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.store = SqliteStore()
        self.live: dict[str, tuple[StoredResponse, str, int]] = {}  # by id: response, server, num_events
        self.final: dict[str, dict[str, Any]] = {}
        self.conversations: dict[str, list[str]] = {}
        self.leases: dict[str, tuple[Lease, str]] = {}

    def teardown(self) -> None:
        self.run(self.store.close())
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def pick(self, entries: Any, number: int) -> Any:
        return list(entries)[number % len(entries)]  # in order of creation, since ids are random

    # ------------------------------------------------------------------ responses

    @rule(server_id=st.sampled_from(SERVERS))
    def begin(self, server_id: str) -> None:
        response = queued()
        self.run(self.store.background.begin(response, server_id))
        self.live[response.id] = (response, server_id, 0)

    @precondition(lambda self: self.live or self.final)
    @rule(number=PICK, server_id=st.sampled_from(SERVERS))
    def append(self, number: int, server_id: str) -> None:
        response_id = self.pick([*self.live, *self.final], number)
        response, owner, num_events = self.live.get(response_id, (None, None, 0))
        more = events(num_events, TurnFailed(None, response_id, None))
        done = self.run(self.store.background.append(response_id, server_id, "in_progress", more))
        assert done == (server_id == owner)
        if done:
            self.live[response_id] = (response, server_id, num_events + 1)

    @precondition(lambda self: self.live or self.final)
    @rule(number=PICK, server_id=st.sampled_from(SERVERS))
    def finish(self, number: int, server_id: str) -> None:
        response_id = self.pick([*self.live, *self.final], number)
        response, owner, num_events = self.live.get(response_id, (make(), None, 0))
        output = (StoredItem({"id": new_id("msg"), "type": "message"}, (1,)),)
        ended = replace(response, id=response_id, status="completed", output=output)
        ended = replace(ended, body={**response.body, "id": response_id, "status": "completed"})
        last = events(num_events, TurnBegan())
        assert self.run(self.store.background.finish(ended, server_id, last)) == (server_id == owner)
        if server_id == owner:
            del self.live[response_id]
            self.final[response_id] = ended.to_object()

    @precondition(lambda self: self.live or self.final)
    @rule(number=PICK, status=st.sampled_from(["cancelled", "failed"]))
    def end(self, number: int, status: str) -> None:
        response_id = self.pick([*self.live, *self.final], number)
        ended = self.run(self.store.background.end(response_id, b"", status))
        if self.live.pop(response_id, None) is not None:
            assert ended.status == status
            self.final[response_id] = ended.to_object()
        assert ended.to_object() == self.final[response_id]

    @rule(server_id=st.sampled_from(SERVERS))
    def expire(self, server_id: str) -> None:
        known = self.run(self.store.jobs.servers())
        if server_id not in known:
            assert not [1 for _, owner, _ in self.live.values() if owner == server_id]
            return
        failed = self.run(self.store.jobs.expire(server_id, known[server_id]))
        mine = {response_id for response_id, (_, owner, _) in self.live.items() if owner == server_id}
        assert set(failed) == mine
        for response_id in mine:
            del self.live[response_id]
            self.final[response_id] = self.run(self.store.get(response_id, b"")).to_object()
            assert self.final[response_id]["status"] == "failed"
        self.leases = {key: entry for key, entry in self.leases.items() if entry[1] != server_id}

    @rule(server_id=st.sampled_from(SERVERS))
    def beat(self, server_id: str) -> None:
        mine = {response_id for response_id, (_, owner, _) in self.live.items() if owner == server_id}
        assert self.run(self.store.jobs.beat(server_id)) == mine

    @precondition(lambda self: self.live or self.final)
    @rule(number=PICK)
    def delete(self, number: int) -> None:
        response_id = self.pick([*self.live, *self.final], number)
        assert self.run(self.store.delete(response_id, b""))
        self.live.pop(response_id, None)
        self.final.pop(response_id, None)

    # ------------------------------------------------------------------ conversations

    @rule()
    def converse(self) -> None:
        made = self.run(self.store.conversations.create(b"", {}, ()))
        self.conversations[made.id] = []

    @precondition(lambda self: self.conversations)
    @rule(number=PICK, server_id=st.sampled_from(SERVERS))
    def take(self, number: int, server_id: str) -> None:
        conversation_id = self.pick(self.conversations, number)
        try:
            lease = self.run(self.store.conversations.take(conversation_id, b"", server_id))
        except ConversationLockedError:
            assert conversation_id in self.leases
            return
        assert conversation_id not in self.leases
        assert lease.end == len(self.conversations[conversation_id])
        self.leases[conversation_id] = (lease, server_id)

    @precondition(lambda self: self.leases)
    @rule(number=PICK, keep=st.booleans())
    def put_in_conversation(self, number: int, keep: bool) -> None:
        conversation_id = self.pick(self.leases, number)
        lease, _ = self.leases.pop(conversation_id)
        response = replace(make(), status="completed" if keep else "failed", conversation_id=conversation_id)
        response = replace(response, input=(StoredItem({"id": new_id("msg"), "type": "message"}),))
        self.run(self.store.put(response, lease))
        self.final[response.id] = response.to_object()
        if keep:
            added = [stored.item["id"] for stored in (*response.input, *response.output)]
            self.conversations[conversation_id] += added
        try:  # a lease ends once
            self.run(self.store.conversations.release(lease, response.input))
        except StoreError:
            return
        raise AssertionError("a lease was used twice")

    @precondition(lambda self: self.conversations)
    @rule(number=PICK)
    def forget(self, number: int) -> None:
        conversation_id = self.pick(self.conversations, number)
        self.run(self.store.conversations.delete(conversation_id, b""))
        del self.conversations[conversation_id]
        self.leases.pop(conversation_id, None)

    # ------------------------------------------------------------------ invariants

    @invariant()
    def reads_agree(self) -> None:
        for response_id, body in self.final.items():
            assert self.run(self.store.get(response_id, b"")).to_object() == body
        for response_id, (_, _, num_events) in self.live.items():
            page = self.run(self.store.background.events(response_id, b"", 0))
            assert (page.live, sum(chunk.num_events for chunk in page.chunks)) == (True, num_events)
        for conversation_id, ids in self.conversations.items():
            history = self.run(self.store.conversations.history(conversation_id, b""))
            assert [stored.item["id"] for stored in history] == ids

    @invariant()
    def totals_are_exact(self) -> None:
        def check(db: Any) -> None:
            for table, column in (("responses", "num_responses"), ("conversations", "num_conversations")):
                counted = db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
                assert counted == db.execute(f"SELECT {column} FROM totals").fetchone()
            size = db.execute(
                "SELECT (SELECT COALESCE(SUM(num_bytes), 0) FROM responses)"
                " + (SELECT COALESCE(SUM(num_bytes), 0) FROM conversations)"
            ).fetchone()
            assert size == db.execute("SELECT num_bytes FROM totals").fetchone()
            contents = (
                f"length(body) + {ROW_BYTES} + COALESCE(length(request), 0)"
                f" + (SELECT COALESCE(SUM(length(item) + length(token_ids) + {ROW_BYTES}), 0) FROM items"
                " WHERE response_seq = seq)"
                f" + (SELECT COALESCE(SUM(length(data) + {ROW_BYTES // 8}), 0) FROM events"
                " WHERE response_seq = seq)"
            )
            assert db.execute(f"SELECT id FROM responses WHERE num_bytes != {contents}").fetchall() == []
            for table, parent in (
                ("items", "response"),
                ("events", "response"),
                ("conversation_items", "conversation"),
            ):
                stray = f"SELECT COUNT(*) FROM {table} WHERE {parent}_seq NOT IN (SELECT seq FROM {parent}s)"
                assert db.execute(stray).fetchone() == (0,)

        self.run(self.store._access.write(check))


StoreMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStore = StoreMachine.TestCase
