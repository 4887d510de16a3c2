"""Log-probabilities of given texts, through an engine as it serves: for tests of whole models.

The texts are forced: what the sampler would choose is replaced by the text's own next token, so the last
tokens of each are computed by decode steps, and every engine computes the same positions. And the
alternatives that come with each token's log-probability are not the best, but the same sample of the
vocabulary everywhere (``SAMPLED`` ids): a sample of the whole distribution, and comparable. All else is the
serving path: scheduler, blocks, graphs, chunks, rows that are sampled again for their log-probabilities.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest, SamplingSpec, StepPlan, TokenLogprobs
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.sampling.batch import SamplingBatch
from chorale.runtime.sampling.logprobs import LogprobTensors
from chorale.runtime.worker import Worker
from chorale.serve.engine.build import build_engine
from tests.support.engine.integrity import check_integrity

Floats = npt.NDArray[np.float64]
SAMPLED = 20  # ids, beside the text's own token


@dataclass(frozen=True)
class Text:
    """Tokens, of which the first ``num_prompt`` are the prompt; an engine decodes the others."""

    tokens: tuple[int, ...]
    num_prompt: int


def random_texts(prompts: Sequence[int], decoded: int, vocab: int) -> list[Text]:
    rng = np.random.default_rng(20)
    return [Text(tuple(rng.integers(0, vocab, n + decoded).tolist()), n) for n in prompts]


class Forcer:
    """Replaces what a worker samples by what the texts say. A row knows its text by its request's seed."""

    def __init__(self, worker: Worker, texts: Sequence[Text]) -> None:
        self._texts, self._run, self._sample = texts, worker.run, worker._sampler.sample
        self._rows: dict[int, Text] = {}

    def run(self, plan: StepPlan) -> Any:
        for start in plan.starts:
            self._rows[start.row] = self._texts[start.seed]
        return self._run(plan)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        self._sample(logits, batch)  # as it would be, for what it launches
        pairs = zip(batch.rows.tolist(), batch.positions.tolist(), strict=True)
        tokens = [self._rows[row].tokens[place] for row, place in pairs]
        return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def sampled_logprobs(vocab: int) -> Any:
    """A stand-in for ``Sampler.logprobs`` whose alternatives are ``SAMPLED`` ids, the same everywhere."""
    ids = np.random.default_rng(7).choice(vocab, SAMPLED, replace=False)

    def gather(
        logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, named: torch.Tensor | None = None
    ) -> LogprobTensors:
        places = torch.from_numpy(ids).to(logits.device).expand(len(logits), -1)[:, :num_top]
        total = logits.double().logsumexp(-1, keepdim=True).float()
        own = (logits.gather(1, token_ids.unsqueeze(1)) - total).squeeze(1)
        return LogprobTensors(
            token_ids, own, torch.zeros_like(token_ids), places, logits.gather(1, places) - total
        )

    return gather


def values(records: Sequence[TokenLogprobs | None]) -> Floats:
    """[positions, 1 + SAMPLED]"""
    rows = [[record.logprob, *record.top_logprobs] for record in records if record is not None]
    return np.array(rows, np.float64).reshape(-1, 1 + SAMPLED)


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of one text's tokens from the second on."""

    prompt: Floats  # [num_prompt - 1, 1 + SAMPLED]; empty if it was not asked for
    decoded: Floats  # [tokens after the prompt, 1 + SAMPLED]


@contextmanager
def engine(folder: Path, texts: Sequence[Text], **options: Any) -> Iterator[EngineCore]:
    """An engine that writes the texts. Its memory is given back afterwards."""
    settings: dict[str, Any] = {
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 4 * 2**30,
    }
    core, _ = build_engine(EngineConfig(model=str(folder), **(settings | options)))
    try:
        with forced(core, texts):
            yield core
    finally:
        core.shutdown()
        del core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def forced(core: EngineCore, texts: Sequence[Text]) -> Iterator[None]:
    executor = core._executor
    assert isinstance(executor, LocalExecutor)
    assert executor._worker is not None
    patch = pytest.MonkeyPatch()
    forcer = Forcer(executor._worker, texts)
    patch.setattr(executor._worker, "run", forcer.run)
    patch.setattr(executor._worker._sampler, "sample", forcer.sample)
    patch.setattr(executor._worker._sampler, "logprobs", sampled_logprobs(core.limits.vocab_size))
    try:
        yield
    finally:
        patch.undo()


def score(
    core: EngineCore,
    texts: Sequence[Text],
    *,
    only: Sequence[int] | None = None,
    whole: bool = False,
    copies: int = 1,
    prompts: bool = True,
) -> list[Scored]:
    """All texts together (or the ``only`` ones), each ``copies`` times, one after the other in the result.

    ``whole``: nothing is decoded, all of a text is its prompt. ``prompts``: prompt tokens are scored too.
    """
    asked = [(number, copy) for number in only or range(len(texts)) for copy in range(copies)]
    found: dict[str, tuple[list[TokenLogprobs | None], list[TokenLogprobs]]] = {}
    for number, copy in asked:
        text = texts[number]
        length = len(text.tokens) - 1 if whole else text.num_prompt
        spec = SamplingSpec(
            seed=number,
            ignore_eos=True,
            max_tokens=len(text.tokens) - length,
            logprobs=SAMPLED,
            prompt_logprobs=SAMPLED if prompts else None,
        )
        name = f"{number}/{copy}"
        found[name] = ([], [])
        prompt_ids = list(text.tokens[:length])
        core.add_request(GenerateRequest(request_id=name, prompt_token_ids=prompt_ids, sampling=spec))
    while core.has_work:
        for chunk in core.step():
            assert chunk.error is None, chunk.error
            found[chunk.request_id][0].extend(chunk.prompt_logprobs or ())
            found[chunk.request_id][1].extend(chunk.logprobs or ())
    check_integrity(core)
    scored = []
    for number, copy in asked:
        text, (prompt, decoded) = texts[number], found[f"{number}/{copy}"]
        assert [record.token_id for record in decoded] == list(text.tokens[-len(decoded) :])
        every = np.concatenate((values(prompt), values(decoded)))
        cut = (text.num_prompt if prompts or whole else 1) - 1
        scored.append(Scored(every[:cut], every[cut:]))
        assert len(scored[-1].decoded) == len(text.tokens) - text.num_prompt
    return scored


@dataclass(frozen=True)
class Errors:
    """Of log-probabilities, absolute. A position's is the mean over its 21 values."""

    mean: float
    p99: float  # of positions
    worst: float  # value
    positions: int

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.4f}  p99 {self.p99:.4f}  worst {self.worst:.3f}  ({self.positions} positions)"
        )


def unrelated(exact: Sequence[Scored]) -> float:
    """The mean error of a model that knows nothing of its context: each position given its neighbour's."""
    every = np.concatenate([part for text in exact for part in (text.prompt, text.decoded)])
    return float(np.abs(every - np.roll(every, 1, axis=0)).mean())


def parts(found: Sequence[Scored], exact: Sequence[Scored]) -> dict[str, Errors]:
    """By what computed it. ``found`` holds each text as often as it was run."""
    copies = len(found) // len(exact)
    pairs = [(text, exact[number // copies]) for number, text in enumerate(found)]
    prompt = [(a.prompt, b.prompt) for a, b in pairs if len(a.prompt)]
    decoded = [(a.decoded, b.decoded) for a, b in pairs]
    return {"all": errors(prompt + decoded), "prompts": errors(prompt), "decoded": errors(decoded)}


def check(
    found: Sequence[Scored], exact: Sequence[Scored], yardstick: Sequence[Scored], coarse: float = 0.5
) -> dict[str, Errors]:
    """Assert that ``found`` is no worse than the yardstick, which differs from ``exact`` by its rounding.

    ``coarse``: share of ``unrelated`` from which on the yardstick's own error would show nothing.

    Rounding now and then turns the choice between two nearly equal experts, which moves all of that position:
    so means and the 99th percentile of positions are bounded, tightly where they are over thousands of
    positions and loosely where over a few; the worst value is reported and not bounded.
    """
    ours, theirs = parts(found, exact), parts(yardstick, exact)
    assert theirs["all"].mean < coarse * unrelated(exact), "the yardstick is too coarse to show anything"
    bounds = {"all": (1.25, 1.5), "prompts": (1.25, 1.5), "decoded": (1.5, 3.0)}
    for name, (of_mean, of_p99) in bounds.items():
        if name == "decoded" or ours["prompts"].positions:
            assert ours[name].mean <= of_mean * theirs[name].mean + 0.002, (name, ours[name], theirs[name])
            assert ours[name].p99 <= of_p99 * theirs[name].p99 + 0.02, (name, ours[name], theirs[name])
    copies = len(found) // len(exact)
    for number, text in enumerate(found):  # each alone: those of a few tokens would not show in the mean
        place = number // copies
        own = parts([text], [exact[place]])["all"]
        usual = max(parts([yardstick[place]], [exact[place]])["all"].mean, theirs["all"].mean)
        assert own.mean <= 3 * usual + 0.01, (place, own, usual)
    return ours


def errors(pairs: Sequence[tuple[Floats, Floats]]) -> Errors:
    """Of (found, exact)."""
    if not pairs:
        return Errors(0.0, 0.0, 0.0, 0)
    apart = np.concatenate([np.abs(found - exact) for found, exact in pairs])
    assert np.isfinite(apart).all()
    each = apart.mean(axis=1)
    return Errors(float(each.mean()), float(np.quantile(each, 0.99)), float(apart.max()), len(each))
