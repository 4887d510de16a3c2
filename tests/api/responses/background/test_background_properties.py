"""A background stream folds to the stored body, for any output and wherever it is interrupted."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorale.harmony.vocab import RETURN
from tests.api.responses.background.test_background import resume
from tests.support.engine.scripted_client import Script
from tests.support.event_loop import run
from tests.support.fuzz.random_turns import streams
from tests.support.responses import fold_events, serve, without_ids

FUNCTIONS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")]
CUTS = ("none", "cancel", "elsewhere", "stop")


async def check(token_ids: list[int], step: int, cut: str, seed: int) -> None:
    rng = random.Random(seed)
    script = Script(token_ids, tokens_per_step=step, hang=cut != "none")
    async with serve(script) as server:
        request: dict[str, Any] = {"input": "go", "tools": FUNCTIONS}
        request["include"] = ["reasoning.encrypted_content"]
        _, made = await server.post(**request, background=True)
        await asyncio.sleep(rng.choice([0, 0.002, 0.01]))
        if cut == "cancel":
            await server.sdk.responses.cancel(made["id"])
        elif cut == "elsewhere":  # another server ends it in the same store
            await server.store.background.end(made["id"], b"", "cancelled")
        elif cut == "stop":
            await server.store.background.settle(made["id"], b"")
            await server.app.state.background.close()
        body = await server.ended(made["id"])
        events = await resume(server, made["id"])
        if any(event["type"] == "response.in_progress" for event in events):
            assert fold_events(copy.deepcopy(events)) == body
        else:
            assert cut != "none"
            assert events[-1]["response"] == body
        after = rng.randrange(len(events))
        assert await resume(server, made["id"], starting_after=after) == events[after + 1 :]
        if cut == "none":
            _, whole = await server.post(**request)
            assert without_ids(whole) == without_ids({**body, "background": False})
        else:
            assert body["status"] == ("failed" if cut == "stop" else "cancelled") or not script.hang


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    token_ids=streams(),
    step=st.sampled_from([1, 3, 64]),
    cut=st.sampled_from(CUTS),
    seed=st.integers(0, 2**31),
)
def test_the_stream_folds_to_the_stored_body(token_ids: list[int], step: int, cut: str, seed: int) -> None:
    run(check(token_ids or [RETURN], step, cut, seed))
