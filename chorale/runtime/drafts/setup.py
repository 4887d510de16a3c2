"""From what drafts (``DraftSetup``) to a worker's Drafting."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorale.kernels.ops import Ops
from chorale.model.draft.head import DraftHead
from chorale.model.gpt_oss import GptOss
from chorale.runtime.device import Device
from chorale.runtime.drafts.drafting import Drafting
from chorale.runtime.drafts.head_runner import HeadRunner
from chorale.runtime.drafts.launched import LaunchedHead
from chorale.runtime.drafts.rows import DraftRows
from chorale.runtime.drafts.verify_graphs import VerifyGraphRunner
from chorale.runtime.sampling.sampler import Sampler
from chorale.runtime.sizing.graph_sizes import MOST_DRAFTING_ROWS
from chorale.runtime.steps.buffers import Buffers


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """``head``: None if drafts come with the plans. ``profile``: see ``Ops.accept``."""

    most_drafts: int  # of a row in a step
    head: DraftHead | None
    ops: Ops  # of one rank: each has the whole head
    profile: tuple[float, ...] = ()


def make_drafting(
    setup: DraftSetup,
    device: Device,
    model: GptOss,
    kv: list[torch.Tensor],
    buffers: Buffers,
    sampler: Sampler,
    *,
    dtype: torch.dtype,
    graph_rows: tuple[int, ...],
    max_len: int,
) -> Drafting:
    """``dtype``: of the target's states. ``graph_rows``: rows of captured steps; (): none is captured. The
    pool's last block is the dummy rows'."""
    num_blocks, _, _, block_size, _ = kv[0].shape
    rows = DraftRows(
        device,
        buffers,
        num_drafts=setup.most_drafts if setup.head is not None else 0,
        window=model.config.sliding_window,
        dummy_block=num_blocks - 1,
    )
    head = launched = None
    if setup.head is not None:
        buffers.draft_state = rows.state
        shape = setup.head.kv_shape(num_blocks, block_size)
        own_kv = torch.zeros(shape, dtype=kv[0].dtype, device=device.torch_device)
        draw = setup.ops.make_sampler(sampler.forbidden, device.sample_rows, ids=setup.head.token_ids)
        head = HeadRunner(setup.head, setup.ops, own_kv, rows.state, draw, max_len=max_len, dtype=dtype)
        launched = LaunchedHead(device, head, rows.state)
    profile, graphs = None, None
    if setup.profile:
        profile = torch.tensor(setup.profile, device=device.torch_device)
    sizes = tuple(size for size in graph_rows if size <= MOST_DRAFTING_ROWS)
    if sizes:
        graphs = VerifyGraphRunner(
            device,
            model,
            kv,
            buffers,
            sampler,
            rows.state,
            head,
            sizes=sizes,
            most_drafts=setup.most_drafts,
            longest=max_len,
            profile=profile,
        )
    return Drafting(rows, head, launched, graphs, profile)
