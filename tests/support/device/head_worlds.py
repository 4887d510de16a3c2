"""Random requests with drafts made on the device: by a random head, or mostly correct ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from chorale.config.engine import EngineConfig
from chorale.config.seeds import choice_seed
from chorale.engine.core import EngineCore
from chorale.engine.drafts.head import HeadDrafter
from chorale.engine.types import GenerateRequest, RowStart
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.machine.hardware import Hardware
from chorale.model.config import ModelConfig
from chorale.model.draft.config import Kind, small_head
from chorale.model.draft.random_head import random_head
from chorale.runtime.build_worker import make_worker
from chorale.runtime.device import CpuDevice
from chorale.runtime.drafts.drafting import Drafting, DraftSetup
from chorale.runtime.drafts.head_runner import ReadTokens
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows
from chorale.runtime.sizing.resolve import resolve
from chorale.serve.engine.build_rank import load_model, weight_target
from tests.support.device.draft_worlds import (
    Answers,
    World,
    check_equal,
    live,
    random_limits,
    random_requests,
)
from tests.support.engine.drafters import restless
from tests.support.runtime import run, with_drafter

MOST_DRAFTS = 5
_MAX_LEN = 128


def head_engine(
    folder: Path, *, captures: bool, block_size: int = 16, kind: Kind = "eagle3", **options: Any
) -> EngineCore:
    """Returns an engine with no drafter whose device can draft. ``captures``: steps run in static memory."""
    device = CpuDevice(Hardware("cpu", "test", 2**34, 2**34), can_capture=captures, overlap=True)
    config = EngineConfig(
        model=str(folder),
        max_model_len=_MAX_LEN,
        max_num_seqs=8,
        num_gpu_blocks_override=1024,
        block_size=block_size,
        num_threads=1,
        **options,
    )
    model_config = ModelConfig.load(folder)
    found = resolve(config, model_config, device.hardware, can_overlap=True, can_capture=captures)
    model = load_model(folder, weight_target(config, model_config, REFERENCE_OPS, found, device), found)
    grammars = GrammarCache(model_config.vocab_size)
    head = random_head(small_head(model_config, kind), REFERENCE_OPS, max_len=_MAX_LEN)
    setup = DraftSetup(MOST_DRAFTS, head, REFERENCE_OPS)
    worker = make_worker(model, found, device, GrammarRows(device, grammars), drafts=setup)
    return EngineCore(found.limits, LocalExecutor(worker), grammars=grammars)


def drafting_of(core: EngineCore) -> Drafting:
    executor = core._executor
    assert isinstance(executor, LocalExecutor)
    assert executor._worker is not None
    assert executor._worker._drafting is not None
    return executor._worker._drafting


@contextmanager
def known_drafts(
    core: EngineCore, known: Answers, requests: list[GenerateRequest], wrong: float
) -> Iterator[None]:
    """Replace the head's drafts by the tokens that a row will sample, with some errors. The head still runs.

    ``wrong``: probability that a token of a draft is wrong.
    """
    drafting, rng = drafting_of(core), random.Random(0)
    assert drafting.head is not None
    state, start, draft = drafting.state, drafting.start, drafting.head.run
    answers = {
        (tuple(each.prompt_token_ids), choice_seed(each.sampling.seed or 0, index)): answer.token_ids
        for each in requests
        for index, answer in enumerate(known[each.request_id])
    }
    tokens: dict[int, list[int]] = {}

    def started(starts: Sequence[RowStart]) -> None:
        for each in starts:
            prompt = each.token_ids[: each.num_prompt_tokens].tolist()
            tokens[each.row] = prompt + answers[tuple(prompt), each.seed]
        start(starts)

    def drafted(read: ReadTokens, num_made: int, longest: int | None = None) -> None:
        draft(read, num_made, longest)
        for row in read.rows.tolist():
            at = int(state.last_position[row]) + 1
            for number, token in enumerate(tokens.get(row, [])[at : at + num_made]):
                state.drafts[number, row] = (token + (rng.random() < wrong)) % core.limits.vocab_size

    with patch.object(drafting, "start", started), patch.object(drafting.head, "run", drafted):
        yield


def check_head_world(
    device: EngineCore, seed: int, count: int, wrong: float | None, grammars: Sequence[str] = ()
) -> World:
    """Run one world without drafts and with drafts of the device. ``wrong``: for ``known_drafts``, None keeps
    the random head's drafts."""
    rng = random.Random(f"{seed}")
    requests = random_requests(rng, count, grammars)
    expected = run(with_drafter(device, None), requests)
    limits = random_limits(rng, device.limits.block_size)
    most = 1 + seed % MOST_DRAFTS
    if seed % 3 == 0:  # otherwise always the maximum
        limits["draft_tokens"] = restless(most, limits["max_num_seqs"])
    core = with_drafter(device, HeadDrafter(most, 64), **limits)
    if wrong is None:
        world = live(core, requests, rng)
    else:
        with known_drafts(device, expected, requests, wrong):
            world = live(core, requests, rng)
    check_equal(world.answers, expected, world.aborted)
    return world
