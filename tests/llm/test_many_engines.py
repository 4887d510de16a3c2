"""LLM with several engine processes on the CPU: the tokens of a single engine, shutdown and faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chorale import LLM, SamplingParams
from chorale.errors import ConfigError, EngineDeadError
from chorale.llm import many_engines, progress
from chorale.llm.many_engines import ManyEngines
from chorale.serve.engine_monitor import EngineMonitor
from tests.llm.test_llm import OPTIONS
from tests.support.event_loop import wait_until
from tests.support.processes import children, is_running
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import FAKE_ENGINE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PROMPTS = [[number + 1, 7, 9] * (3 + number % 4) for number in range(10)]


FAKE = Behaviour(step_seconds=0.005, task_seconds=0.0).encode().model
fake_engines = partial(EngineMonitor, command=FAKE_ENGINE)


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    """Real processes with a fake device, which start and restart in a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many_engines, "EngineMonitor", fake_engines)
        made = LLM(FAKE, data_parallel_size=2, seed=5)
    with made:
        yield made


def engine(llm: LLM) -> ManyEngines:
    assert isinstance(llm._engine, ManyEngines)
    return llm._engine


def pids(llm: LLM) -> list[int]:
    return [each.pid for each in engine(llm)._monitors if each.pid is not None]


def wait_gone(running: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, running)), "the end of the engines", 30)


def outputs(results: list[Any]) -> list[Any]:
    return [
        [(each.text, each.token_ids, each.finish_reason) for each in result.outputs] for result in results
    ]


def test_two_engines_give_the_tokens_of_one(folder: Path) -> None:
    """This includes requests without a seed: their seeds are drawn in the order of prompts."""
    options = {**OPTIONS, "device": "cpu", "seed": 5}
    with LLM(str(folder), **options) as one, LLM(str(folder), **options, data_parallel_size=2) as two:
        for params in (
            SamplingParams(max_tokens=12),
            SamplingParams(max_tokens=8, seed=3, n=2, logprobs=2),
            SamplingParams(max_tokens=20, n=2, stop=["a", "e", "1"]),
        ):
            found = two.generate(PROMPTS, params)
            assert [result.prompt_token_ids for result in found] == PROMPTS
            assert outputs(found) == outputs(one.generate(PROMPTS, params))
        talk: Any = [[{"role": "user", "content": f"What is {number}?"}] for number in range(3)]
        asked = SamplingParams(max_tokens=16, seed=1)
        assert outputs(two.chat(talk, asked)) == outputs(one.chat(talk, asked))
        assert all(each.stats.num_steps for each in engine(two)._client.engines)  # both have worked


def bar(update: Callable[[int], None]) -> Any:
    """Returns a progress bar that calls ``update``."""
    return lambda **_: SimpleNamespace(postfix="", update=update, close=lambda: None)


def test_an_interrupt_aborts_the_call_and_leaves_the_engines_usable(two: LLM) -> None:
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    params = [SamplingParams(max_tokens=2)] + [SamplingParams(max_tokens=490, ignore_eos=True)] * 7
    with pytest.raises(KeyboardInterrupt):
        two.generate(PROMPTS[:8], params, use_tqdm=bar(interrupt))
    assert engine(two)._client.num_in_flight == 0
    assert len(two.generate(PROMPTS[:3], SamplingParams(max_tokens=2))) == 3


def test_killing_an_engine_during_a_call_changes_no_token(two: LLM) -> None:
    killed: list[int] = []

    def kill(count: int) -> None:
        if not killed:
            killed.append(pids(two)[0])
            os.kill(killed[0], signal.SIGKILL)

    short, long = SamplingParams(max_tokens=2), SamplingParams(max_tokens=120, ignore_eos=True, seed=7)
    params = [short] * 2 + [long] * 4
    expected = outputs(two.generate(PROMPTS[:6], params))[2:]
    assert outputs(two.generate(PROMPTS[:6], params, use_tqdm=bar(kill)))[2:] == expected
    assert len(two.generate(PROMPTS[:3], SamplingParams(max_tokens=2))) == 3  # waits until both are ready
    assert killed[0] not in pids(two)


def test_a_call_within_a_call_is_refused(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_INTERVAL", 0.0)  # else the bar may be updated only after the call

    def call_again(count: int) -> None:
        two.generate(PROMPTS[:1], SamplingParams(max_tokens=2))

    with pytest.raises(RuntimeError, match="within a call"):
        two.generate(PROMPTS[:2], SamplingParams(max_tokens=2), use_tqdm=bar(call_again))
    assert engine(two)._client.num_in_flight == 0


def test_metrics_right_after_a_command_show_its_state(two: LLM) -> None:
    for change, state in ((lambda: two.sleep(2), "discard_all"), (two.wake_up, "awake")):
        change()
        found = [each for each in two.get_metrics() if each.labels.get("sleep_state") == state]
        assert [vars(each)["value"] for each in found] == [1.0, 1.0]


def test_shutdown_ends_the_processes_and_removes_their_folder(two: LLM) -> None:
    """This test must be the last that uses ``two``."""
    running = pids(two)
    directory = Path(engine(two)._monitors[0]._start.directory).parent
    assert len(running) == 2
    two.shutdown()
    two.shutdown()
    wait_gone(running)
    assert not directory.exists()
    with pytest.raises(EngineDeadError, match="shut down"):
        two.generate([[1]])


PROGRAM = """
import functools, sys, time
from chorale import LLM
from chorale.llm import many_engines
from tests.support.serve.harness import FAKE_ENGINE
many_engines.EngineMonitor = functools.partial(many_engines.EngineMonitor, command=FAKE_ENGINE)
llm = LLM(sys.argv[1], data_parallel_size=2)
print(*[each.pid for each in llm._engine._monitors], flush=True)
time.sleep(600)
"""


def test_engines_end_when_their_caller_is_killed() -> None:
    caller = subprocess.Popen([sys.executable, "-c", PROGRAM, FAKE], stdout=subprocess.PIPE, text=True)
    try:
        assert caller.stdout is not None
        running = [int(pid) for pid in caller.stdout.readline().split()]
    finally:
        caller.kill()
        caller.communicate()
    assert len(running) == 2
    wait_gone(running)


def test_a_configuration_that_an_engine_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_engines, "EngineMonitor", fake_engines)
    with pytest.raises(ConfigError, match="no such tensor"):
        LLM(Behaviour(refuse="no such tensor").encode().model, data_parallel_size=2)


@pytest.mark.parametrize("size", [0, 65, "2", 1.5])
def test_a_bad_number_of_engines_is_an_error(folder: Path, size: Any) -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_size=.*must be an integer, 1 to 64"):
        LLM(str(folder), data_parallel_size=size)


RANKS: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 8, "num_threads": 1}
TEXTS = ["The capital of France is", "Two and two is", "Once upon a time", "A list of colours: red,"]
GREEDY, SEEDED = SamplingParams(max_tokens=10, temperature=0.0), SamplingParams(max_tokens=10, seed=3, n=2)


def ranks_of(llm: LLM) -> list[int]:
    return [rank for pid in pids(llm) for rank in children(pid)]


@pytest.mark.slow
def test_two_engines_of_two_ranks_give_the_tokens_of_one() -> None:
    """No process remains after the shutdown."""
    with LLM("demo", **RANKS) as one:
        expected = [outputs(one.generate(TEXTS, params)) for params in (GREEDY, SEEDED)]
    with LLM("demo", **RANKS, data_parallel_size=2, tensor_parallel_size=2) as llm:
        assert [outputs(llm.generate(TEXTS, params)) for params in (GREEDY, SEEDED)] == expected
        left = [*pids(llm), *ranks_of(llm)]
        assert len(left) == 4
        assert all(each.stats.num_steps for each in engine(llm)._client.engines)  # both have worked
    wait_gone(left)
