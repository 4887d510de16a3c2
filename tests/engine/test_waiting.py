"""WaitingQueue: order, lazy removal."""

from __future__ import annotations

import numpy as np

from chorale.engine.sequence import RequestState, Sequence, Status
from chorale.engine.types import GenerateRequest
from chorale.engine.waiting import WaitingQueue
from tests.support.engine.integrity import live


def sequence(priority: int, arrival: int) -> Sequence:
    request = GenerateRequest(request_id=f"{priority}-{arrival}", prompt_token_ids=[1])
    state = RequestState(request=request, prompt=np.ones(1, np.int32), root=None, arrival=0.0)
    return Sequence(state, 0, key=(priority, arrival), seed=0, max_len=10)


def test_clients_that_come_and_go_do_not_fill_the_heap() -> None:
    queue, stays = WaitingQueue(), sequence(0, 0)
    queue.push(stays)
    for arrival in range(1, 1000):
        gone = sequence(0, arrival)
        queue.push(gone)
        queue.forget(gone)
        gone.status = Status.ENDED
        assert sum(map(len, queue._heaps.values())) <= 20
    assert live(queue) == [stays]
    assert len(queue) == 1
