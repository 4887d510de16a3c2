"""The head that ships, on the demo as it is served: how many of its drafts the demo's own answers keep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from chorale.kernels import select_ops
from chorale.kernels.ops import ForwardBatch
from chorale.measure.steps import PagedSequences
from chorale.model.config import ModelConfig
from chorale.model.demo import HEAD_ARCHIVE, ensure_demo, ensure_demo_head
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import Target, load_weights
from training.corpus import arithmetic, letters, lists, sample, structured, tools
from training.head.evaluate import MOST, Tally, matches_of
from training.head.export import from_published
from training.head.net import Chain, HeadNet, Sources

FAMILIES = (arithmetic.sums, letters.change, lists.reverse, structured.json_answer, tools.one_call)
PAGE = 16


class Served:
    """The demo in float32 by the reference back end, and the residual stream between its layers."""

    def __init__(self) -> None:
        folder = ensure_demo()
        config = ModelConfig.load(folder)
        ops = select_ops("reference", "cpu")
        weights = load_weights(folder, Target(config, ops, torch.float32))
        self.embedding, self.config, self.ops = weights.embedding, config, ops
        self._seen: list[torch.Tensor] = []

        def qkv_rope_cache(x: torch.Tensor, *rest: Any) -> Any:
            self._seen.append(x.clone())
            return ops.qkv_rope_cache(x, *rest)

        self.model = GptOss(config, weights, replace(ops, qkv_rope_cache=qkv_rope_cache), max_len=1024)

    def states(self, row: list[int]) -> list[torch.Tensor]:
        """[tokens, H] after 0, 1, ... blocks."""
        paged = PagedSequences([len(row)], PAGE, torch.device("cpu"))
        pools = [paged.pool(self.config, torch.float32) for _ in range(self.config.num_kv_tensors)]
        meta = paged.whole().meta
        self._seen.clear()
        last = self.model.hidden(ForwardBatch(torch.tensor(row), meta.positions[-1:], meta), pools)
        return [*self._seen, last]


@dataclass(frozen=True, slots=True)
class Conversation:
    """``states`` of the demo, and where an answer begins and ends."""

    ids: list[int]
    states: list[torch.Tensor]
    start: int
    end: int


@pytest.fixture(scope="module")
def served() -> Served:
    return Served()


@pytest.fixture(scope="module")
def conversations(served: Served) -> list[Conversation]:
    """Answers of the corpus, most of which the demo gives too, to questions that training never drew."""
    found = []
    for family in FAMILIES:
        for seed in range(3):
            ids, learned = sample(79_000_000 + seed, "eval", family).tokens()
            first = int(learned.argmax())
            answer = learned[first:].argmin() or len(learned) - first
            row = ids[: first + answer].tolist()
            found.append(Conversation(row, served.states(row), first, first + int(answer)))
    return found


def length(
    served: Served, net: HeadNet, conversations: list[Conversation], boundaries: tuple[int, ...]
) -> float:
    """Acceptance length at three drafts a step, greedily drafted."""
    tally = Tally()
    with torch.inference_mode():
        for one in conversations:
            aux = torch.cat([one.states[boundary] for boundary in boundaries], dim=-1).unsqueeze(0)
            tokens = torch.tensor([one.ids])
            embedded = F.embedding(tokens.roll(-1, 1), served.embedding).float()
            given = Sources(aux, embedded, torch.arange(len(one.ids)).unsqueeze(0))
            anchors = torch.arange(one.start - 1, one.end - 2).unsqueeze(0)
            matrices = net.matrices()
            chain = Chain(net, matrices, given, anchors)
            kept = []
            for step in range(MOST):
                drafts = net.draft_ids[net.logits(chain.x, matrices).argmax(-1)]
                kept.append(matches_of(drafts, tokens, anchors, step))
                chain.advance(F.embedding(drafts, served.embedding).float())
            tally.walk(torch.stack(kept, dim=-1)[0], 3)
    return tally.tokens / tally.steps


@pytest.fixture(scope="module")
def net() -> HeadNet:
    net = from_published(ensure_demo_head())
    net.dtype = torch.float32
    return net


def test_the_head_archive_is_small_enough_for_the_wheel() -> None:
    assert HEAD_ARCHIVE.stat().st_size < 2e6


def test_shifted_states_reduce_the_acceptance_length(
    served: Served, net: HeadNet, conversations: list[Conversation]
) -> None:
    """A state too early or too late silently costs acceptance: others shipped that fault more than once."""
    boundaries = net.shape.boundaries
    right = length(served, net, conversations, boundaries)
    earlier = length(served, net, conversations, tuple(one - 1 for one in boundaries))
    later = length(served, net, conversations, tuple(min(one + 1, 6) for one in boundaries))
    assert right > 3.2  # 3.44 of at most 4
    assert earlier < 0.85 * right  # 2.70
    assert later < 0.97 * right  # 3.27: the last of the three states is right
