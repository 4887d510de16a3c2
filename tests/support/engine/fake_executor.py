"""FakeExecutor: a device whose next token is a hash of the prefix *as its simulated KV blocks hold it*.

It keeps block tables built from ``appends`` alone and blocks that store, for each slot, the token and the
hash of the whole prefix up to it (as real keys and values depend on it). Slots of host memory hold copies of
blocks. Each sampling row reads its whole prefix through the FULL table and the last ``window`` tokens through
the WINDOW table, verifies both, and hashes them. A wrong table, a block freed or reused too early, a wrong
count of computed tokens, a prefix hit on the wrong content: each raises ``EngineError`` or changes the
tokens. ``FakeModel.generate`` returns the tokens that a request must get, computed from its prompt alone.

Needs no torch.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from chorale.engine.types import (
    CacheGroup,
    EngineLimits,
    ExpertIds,
    HostLoad,
    IntArray,
    RowStart,
    SamplingSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Transfers,
)
from chorale.errors import EngineError

U64 = npt.NDArray[np.uint64]
Slots = tuple[IntArray, IntArray]  # blocks, and offsets in them
MASK = 2**64 - 1
DRAFT_ERRORS = 0.3  # how often a token that the simulated head drafts is wrong
MULTIPLIER = 0x9E3779B97F4A7C15  # odd: multiplication by it permutes 64-bit numbers


def mix(value: int) -> int:
    """Scatter 64 bits (the finaliser of splitmix64)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


class FakeModel:
    """The arithmetic: prefix hashes, and the token that follows a hash.

    Honours temperature 0 (the seed has no effect), seed, min_tokens and allowed_token_ids; ignores the other
    sampling fields. A token is a stop id with ``stop_probability``.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 201088,
        eos_token_ids: tuple[int, ...] = (200002,),
        stop_probability: float = 0.02,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._stop_below = int(stop_probability * 2**32)
        self._powers: U64 = np.ones(1, np.uint64)

    def prefix_hashes(self, tokens: IntArray, before: int = 0, start: int = 0) -> U64:
        """Returns the prefix hash at each of ``tokens``, which begin at ``start`` after hash ``before``.

        A polynomial in MULTIPLIER modulo 2**64: sums over a chunk continue those before it.
        """
        stop = start + len(tokens)
        while len(self._powers) < stop:
            grown = self._powers * np.uint64(pow(MULTIPLIER, len(self._powers), 2**64))
            self._powers = np.concatenate([self._powers, grown])
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[start:stop]
        return np.cumsum(terms, dtype=np.uint64) + np.uint64(before)

    def next_token(self, prefix_hash: int, num_output: int, sampling: SamplingSpec, seed: int) -> int:
        """``num_output``: number of tokens sampled before this one."""
        salt = 0 if sampling.temperature == 0 else seed + 1
        draw = mix(prefix_hash ^ mix(salt & MASK))
        stops = () if sampling.ignore_eos else self.eos_token_ids
        stops += sampling.stop_token_ids
        if stops and draw & 0xFFFFFFFF < self._stop_below and num_output >= sampling.min_tokens:
            return stops[(draw >> 32) % len(stops)]
        choices = sampling.allowed_token_ids
        token = choices[(draw >> 32) % len(choices)] if choices else (draw >> 32) % self.vocab_size
        while token in stops and num_output < sampling.min_tokens:
            token = (token + 1) % self.vocab_size
        return token

    def generate(
        self, prompt: list[int], sampling: SamplingSpec, seed: int, max_len: int
    ) -> tuple[list[int], str]:
        """Returns a choice's output and why it ends. ``max_len`` counts prompt and output."""
        ids = np.array(prompt, np.int32)
        prefix = int(self.prefix_hashes(ids)[-1])
        stops = set(() if sampling.ignore_eos else self.eos_token_ids) | set(sampling.stop_token_ids)
        output: list[int] = []
        if sampling.max_tokens is not None:
            max_len = min(max_len, len(prompt) + sampling.max_tokens)
        while len(prompt) + len(output) < max_len:
            token = self.next_token(prefix, len(output), sampling, seed)
            position = len(prompt) + len(output)
            output.append(token)
            if token in stops and len(output) > sampling.min_tokens:
                return output, "stop"
            prefix = int(self.prefix_hashes(np.array([token], np.int32), prefix, position)[-1])
        return output, "length"


@dataclass(slots=True)
class FakeRow:
    """The device's state of one row."""

    start: RowStart
    tables: tuple[dict[int, int], dict[int, int]]  # logical block -> block, by group
    last_token: int = -1
    num_computed: int = 0  # the position of ``last_token``
    drafts: list[int] = field(default_factory=list)  # made by the head after the newest step


@dataclass(slots=True)
class FakeLoad:
    """Pages on their way from host memory."""

    message: HostLoad
    steps_left: int
    is_copied: bool = False


@dataclass(frozen=True, slots=True)
class FakeHandle:
    """A step whose result is ready at ``ready_at`` (seconds of the monotonic clock)."""

    step_result: StepResult | EngineError
    ready_at: float

    def __call__(self) -> StepResult:
        wait = self.ready_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        if isinstance(self.step_result, EngineError):
            raise self.step_result
        return self.step_result


class FakeExecutor:
    """Implements ``Executor``. Steps "run" when they are handed over, in order, as on a device stream.

    ``step_seconds``: how long a step takes; steps queue behind each other. ``fail_at_step``: the result of
    that step raises. A load from host memory takes a random number of steps, and copies at the beginning or
    at the end.
    """

    def __init__(
        self,
        limits: EngineLimits,
        model: FakeModel | None = None,
        *,
        step_seconds: float = 0.0,
        fail_at_step: int | None = None,
    ) -> None:
        self.model = model or FakeModel(vocab_size=limits.vocab_size, eos_token_ids=limits.eos_token_ids)
        self._limits = limits
        self._step_seconds = step_seconds
        self._fail_at_step = fail_at_step
        self._ready_at = 0.0
        shape = (limits.num_blocks, limits.block_size)
        self._tokens: IntArray = np.full(shape, -1, np.int32)
        self._hashes: U64 = np.zeros(shape, np.uint64)
        self._groups: IntArray = np.full(shape, -1, np.int32)
        self._host: dict[int, tuple[IntArray, U64, IntArray]] = {}  # slot -> the saved content of a block
        self._loads: deque[FakeLoad] = deque()  # in the order in which they run
        self._load_steps, self._rng = 3, random.Random(0)  # the most steps of a load
        self._rows: dict[int, FakeRow] = {}
        self._next_step_id: int | None = None
        self.num_shutdowns = 0

    def use_idle_time(self) -> bool:
        return False

    def execute(self, plan: StepPlan) -> FakeHandle:
        if self._next_step_id not in (None, plan.step_id):
            raise EngineError(f"got step {plan.step_id}, expected step {self._next_step_id}")
        self._next_step_id = plan.step_id + 1
        now = time.monotonic() if self._step_seconds else 0.0
        self._ready_at = max(self._ready_at, now) + self._step_seconds
        outcome: StepResult | EngineError = self._run(plan)
        if plan.step_id == self._fail_at_step:
            outcome = EngineError("the fake device failed")
        return FakeHandle(outcome, self._ready_at)

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    # ------------------------------------------------------------------ one step

    def _run(self, plan: StepPlan) -> StepResult:
        if plan.transfers is not None:
            self._transfer(plan.transfers)
        done = self._advance_loads()
        if not len(plan.rows):
            none: IntArray = np.zeros(0, np.int32)
            return StepResult(plan.step_id, none.reshape(0, 1), none, loads_done=done)
        for start in plan.starts:
            self._rows[start.row] = FakeRow(start, ({}, {}))
        for group, row, index, block in plan.append_columns.T.tolist():
            self._rows[row].tables[group][index] = block
        self._check(plan)
        num_drafts = [0] * len(plan.rows) if plan.num_drafts is None else plan.num_drafts.tolist()
        sampled = np.full((len(plan.rows), 1 + max(num_drafts)), -1, np.int32)
        num_sampled = plan.samples.astype(np.int32)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        drafts: IntArray = np.full((len(plan.rows), max(plan.num_made, 0)), -1, np.int32)
        hashes: list[U64] = []
        offset = 0
        for entry, (row, computed, count) in enumerate(
            zip(plan.rows.tolist(), plan.num_computed.tolist(), plan.num_new.tolist(), strict=True)
        ):
            state = self._rows[row]
            tokens = plan.token_ids[offset : offset + count]
            offset += count
            if (tokens <= -2).any():
                tokens, computed = self._drafted(state, tokens, computed)
            hashes.append(self._write(state, tokens, computed))
            if row in plan.prompt_logprob_rows:
                prompt_logprobs[entry] = fake_prompt_logprobs(state.start, computed, count)
            if plan.samples[entry]:
                draft = tokens[count - num_drafts[entry] :].tolist()
                kept = self._verified(state, computed + count - len(draft), draft)
                state.last_token = kept[-1]
                state.num_computed = computed + count - len(draft) + len(kept) - 1
                state.drafts = []
                if plan.makes is not None and plan.makes[entry]:
                    state.drafts = self._make_drafts(state, plan.num_made)
                    drafts[entry] = state.drafts
                num_sampled[entry] = len(kept)
                sampled[entry, : len(kept)] = kept
                if state.start.sampling.logprobs is not None:
                    logprobs[entry] = [fake_logprobs(token, state.start.sampling.logprobs) for token in kept]
            elif plan.following is not None:
                after = state.start.token_ids[computed + count]
                if plan.following[entry] != after:
                    raise EngineError("an entry's following token differs from the prompt's")
        if offset != plan.num_tokens:
            raise EngineError(f"plan has {plan.num_tokens} tokens, its rows {offset}")
        ids = None if self._limits.routed_experts is None else fake_experts(np.concatenate(hashes))
        return StepResult(
            plan.step_id,
            sampled,
            num_sampled,
            logprobs,
            prompt_logprobs,
            drafts,
            loads_done=done,
            experts=ids,
        )

    # ------------------------------------------------------------------ host memory

    def _transfer(self, transfers: Transfers) -> None:
        for load_id in transfers.finished:  # a load of a failed engine may still be running
            while any(load.message.load_id == load_id for load in self._loads):
                self._copy(self._loads.popleft())
        if len(transfers.saved_slots) > self._limits.max_saved_pages:
            raise EngineError("a plan saves more pages than max_saved_pages")
        self._save(transfers.saved_slots, transfers.saved_blocks)
        for message in transfers.loads:
            load = FakeLoad(message, self._rng.randint(0, self._load_steps))
            self._loads.append(load)
            if self._rng.random() < 0.5 and len(self._loads) == 1:
                self._copy(load)

    def _advance_loads(self) -> tuple[int, ...]:
        """Let each load take another step, and return those that have ended."""
        done = []
        for load in self._loads:
            load.steps_left -= 1
        while self._loads and self._loads[0].steps_left < 0:
            load = self._loads.popleft()
            self._copy(load)
            done.append(load.message.load_id)
        return tuple(done)

    def _copy(self, load: FakeLoad) -> None:
        if load.is_copied:
            return
        load.is_copied, message = True, load.message
        self._save(message.saved_slots, message.saved_blocks)
        for slot, block in zip(message.slots.tolist(), message.blocks.tolist(), strict=True):
            if slot not in self._host:
                raise EngineError(f"host slot {slot} is loaded, but nothing was saved there")
            self._tokens[block], self._hashes[block], self._groups[block] = self._host[slot]

    def _save(self, slots: IntArray, blocks: IntArray) -> None:
        if len(set(slots.tolist())) != len(slots):
            raise EngineError("two pages are saved to one slot")
        if len(slots) and not 0 <= slots.min() <= slots.max() < self._limits.num_host_slots:
            raise EngineError("a page is saved to a slot that does not exist")
        for slot, block in zip(slots.tolist(), blocks.tolist(), strict=True):
            self._host[slot] = (
                self._tokens[block].copy(),
                self._hashes[block].copy(),
                self._groups[block].copy(),
            )

    def _check(self, plan: StepPlan) -> None:
        """Checks the conditions of every plan."""
        limits, ends = self._limits, plan.num_computed + plan.num_new
        if len(set(plan.rows.tolist())) != len(plan.rows):
            raise EngineError("a row appears twice in one plan")
        if not 0 < plan.num_tokens <= limits.max_num_batched_tokens or len(plan.rows) > limits.max_num_seqs:
            raise EngineError(f"{len(plan.rows)} rows with {plan.num_tokens} tokens break the limits")
        if plan.num_new.min() < 1 or plan.num_computed.min() < 0 or ends.max() >= limits.max_model_len:
            raise EngineError("an entry computes no token, or reaches the maximum length")
        if plan.num_drafts is not None:
            is_drafted = plan.num_drafts > 0
            if (plan.num_new != 1 + plan.num_drafts)[is_drafted].any() or not plan.samples[is_drafted].all():
                raise EngineError("an entry with a draft is not a decoding row")

    def _write(self, state: FakeRow, tokens: IntArray, computed: int) -> U64:
        """Store new tokens, from position ``computed``, in blocks of both groups. Return their hashes."""
        if tokens[0] == -1:
            tokens = np.array([state.last_token, *tokens[1:]], np.int32)
        if tokens.min() < 0:
            raise EngineError("a token is expected on the device, but is not there")
        before = 0
        if computed:
            blocks, offsets = self._slots(state, CacheGroup.FULL, computed - 1, computed)
            before = int(self._hashes[blocks, offsets][0])
        hashes = self.model.prefix_hashes(tokens, before, computed)
        for group in CacheGroup:
            where = self._slots(state, group, computed, computed + len(tokens))
            self._tokens[where], self._hashes[where], self._groups[where] = tokens, hashes, group
        return hashes

    def _drafted(self, state: FakeRow, tokens: IntArray, computed: int) -> tuple[IntArray, int]:
        """Return the tokens of an entry whose draft is on the device, and where they begin."""
        count = len(tokens) - 1
        if tokens[1:].tolist() != [-2 - number for number in range(count)] or count > len(state.drafts):
            raise EngineError("an entry verifies draft tokens that the device does not have")
        if state.num_computed > computed:
            raise EngineError("an entry begins after the position that its plan assumed")
        return np.array([tokens[0], *state.drafts[:count]], np.int32), state.num_computed

    def _make_drafts(self, state: FakeRow, count: int) -> list[int]:
        """Draft the tokens after the last one, with errors. The head also writes to the FULL blocks."""
        position, token, drafts = state.num_computed, state.last_token, []
        blocks, offsets = self._slots(state, CacheGroup.FULL, position - 1, position)
        prefix = int(self._hashes[blocks, offsets][0])
        self._slots(state, CacheGroup.FULL, position, position + count)
        for _ in range(count):
            prefix = int(self.model.prefix_hashes(np.array([token], np.int32), prefix, position)[-1])
            position += 1
            num_output = position - state.start.num_prompt_tokens
            token = self.model.next_token(prefix, num_output, state.start.sampling, state.start.seed)
            if mix(prefix) & 0xFFFFFFFF < DRAFT_ERRORS * 2**32:
                token = (token + 1) % self.model.vocab_size
            drafts.append(token)
        return drafts

    def _verified(self, state: FakeRow, length: int, draft: list[int]) -> list[int]:
        """Sample after ``length`` tokens and after each of the draft's, up to the first that differs."""
        kept = [self._sample(state, length)]
        while len(kept) <= len(draft) and kept[-1] == draft[len(kept) - 1]:
            kept.append(self._sample(state, length + len(kept)))
        return kept

    def _sample(self, state: FakeRow, length: int) -> int:
        """Read the prefix of ``length`` tokens back through both tables; its hash determines the token."""
        where = self._slots(state, CacheGroup.FULL, 0, length)
        tokens = self._tokens[where]
        hashes = self.model.prefix_hashes(tokens)
        self._verify(state, CacheGroup.FULL, 0, where, tokens, hashes)
        first = max(0, length - self._limits.sliding_window)
        where = self._slots(state, CacheGroup.WINDOW, first, length)
        self._verify(state, CacheGroup.WINDOW, first, where, tokens[first:], hashes[first:])
        num_output = length - state.start.num_prompt_tokens
        return self.model.next_token(int(hashes[-1]), num_output, state.start.sampling, state.start.seed)

    def _verify(
        self, state: FakeRow, group: CacheGroup, start: int, where: Slots, tokens: IntArray, hashes: U64
    ) -> None:
        """Compare what slots ``where`` hold with the tokens from position ``start`` and their hashes."""
        good = (self._tokens[where] == tokens) & (self._hashes[where] == hashes)
        good &= self._groups[where] == group.value
        if not good.all():
            position = start + int(np.flatnonzero(~good)[0])
            raise EngineError(f"row {state.start.row}: {group.name} position {position} holds another prefix")

    def _slots(self, state: FakeRow, group: CacheGroup, start: int, stop: int) -> Slots:
        """Return the blocks and offsets of positions [start, stop)."""
        positions = np.arange(start, stop, dtype=np.int32)
        table, bs = state.tables[group], self._limits.block_size
        first = start // bs
        try:
            blocks = np.array([table[i] for i in range(first, (stop - 1) // bs + 1)], np.int32)
        except KeyError as error:
            raise EngineError(f"row {state.start.row}: {group.name} has no block {error}") from None
        return blocks[positions // bs - first], positions % bs


def fake_experts(hashes: U64) -> ExpertIds:
    """Return the bytes of the prefix hashes as the experts of 2 layers with 4 experts per token."""
    return hashes.view(np.uint8).reshape(-1, 2, 4)


def fake_logprobs(token: int, top: int) -> TokenLogprobs:
    """Return plausible numbers that depend on the token alone."""
    logprob = -0.25 - (token % 7) / 8
    ids = [token + i for i in range(top)]
    return TokenLogprobs(token, logprob, 1, ids, [logprob - i for i in range(top)])


def fake_prompt_logprobs(start: RowStart, computed: int, count: int) -> list[TokenLogprobs]:
    """Return one for each next prompt token of positions [computed, computed + count)."""
    stop = min(computed + count, start.num_prompt_tokens - 1)
    top = start.sampling.prompt_logprobs or 0
    return [fake_logprobs(int(token), top) for token in start.token_ids[computed + 1 : stop + 1]]
