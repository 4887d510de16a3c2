"""``chorale serve --tensor-parallel-size 2``: the server recovers after a rank is killed.

``parallel/test_rank_faults.py`` shows that the engine fails and names the rank, ``test_engine_monitor.py``
that a failed engine is replaced. The whole server with ranks takes half a minute: these tests are slow.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import openai
import pytest

from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from tests.parallel.test_ranks import WIDE
from tests.support.event_loop import wait_until
from tests.support.processes import children, exists
from tests.support.served import Served, serving

NOTICED = 3.0  # seconds until requests fail after a kill
RESTARTED = 60.0  # seconds until the engine is ready again


def rank_of(served: Served) -> int:
    """Returns the process id of rank 1. With GPUs there are compile processes as well; while one of them
    ends, the list of children may be incomplete."""
    (engine,) = served.engine_pids()
    served.wait_until("a rank", lambda: children(engine, "rank_entry"), 5.0)
    (rank,) = children(engine, "rank_entry")
    return rank


def failure_of(served: Served, prompt: str | list[str], max_tokens: int) -> tuple[str, float]:
    """Kills a rank while a completion streams. Returns the error, and the seconds until it arrived."""
    killed: list[float] = []
    rank = rank_of(served)

    def kill() -> None:
        served.wait_until("a running request", lambda: served.metric("vllm:num_requests_running") > 0)
        time.sleep(0.2)
        killed.append(time.monotonic())
        os.kill(rank, signal.SIGKILL)

    timer = threading.Thread(target=kill)
    timer.start()
    with pytest.raises(openai.APIError) as caught:
        for _ in served.client().completions.create(
            model="m", prompt=prompt, max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
        ):
            pass
    ended = time.monotonic()
    timer.join()
    return str(caught.value), ended - killed[0]


DECODE, PREFILL = ("a decode", 8000), ("a long prompt " * 4000, 1)


@pytest.mark.slow  # two cases, since a server gives up after 20 deaths in 5 minutes
@pytest.mark.parametrize("kills", [[DECODE] * 10, [PREFILL] * 10], ids=["decodes", "prefills"])
def test_a_killed_rank_fails_its_requests_and_the_engine_restarts(
    kills: list[tuple[str, int]], tmp_path: Path
) -> None:
    folder = write_random_checkpoint(tmp_path / "model", make_config(**WIDE), seed=3)
    options = ("--tensor-parallel-size", "2", "--num-threads", "1", "--served-model-name", "m")
    left: list[int] = []
    with serving(folder, tmp_path, *options, "--max-model-len", "16384") as served:
        for prompt, max_tokens in kills:
            rank = rank_of(served)
            left += [*served.engine_pids(), rank]
            error, seconds = failure_of(served, prompt, max_tokens)
            assert "the engine failed" in error
            assert seconds < NOTICED
            assert f"rank 1 (process {rank}) was killed by SIGKILL" in served.log.read_text()
            served.wait_until("the restart", lambda: served.health() == 200, RESTARTED)
            assert rank_of(served) != rank
        answer = served.client().completions.create(model="m", prompt="again", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        left += [*served.engine_pids(), rank_of(served)]
    wait_until(lambda: not any(map(exists, left)), "the end of all processes", NOTICED)
    # The names of torch's shared memory contain the process id; other tests may have some at the same time.
    assert not [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in left)]
