"""Grammars on a GPU: masks arrive in time at either overlap depth, and bind. ``pytest -m gpu``."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest, SamplingSpec
from chorale.grammar.constraint import json_schema
from chorale.grammar.frames import Frames, turn_grammar
from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import START
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from chorale.serve.engine.build import build_engine
from tests.support.grammar.schema_cases import BIAS, SCHEMAS, VOCAB, valid

pytestmark = pytest.mark.gpu
NAMES = [name for name in SCHEMAS if name != "anything"]
LOGIT_BIAS = {int(token): bias for token, bias in BIAS.items()}


@pytest.fixture(scope="session", params=["reference", "triton"])
def core(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    config = make_config(layers=2, experts=4, hidden=64, inter=64, heads=4, kv_heads=2, head_dim=64)
    folder = write_random_checkpoint(tmp_path_factory.mktemp("model") / "random", config, seed=1)
    made, _ = build_engine(
        EngineConfig(
            model=str(folder),
            device="cuda",
            ops=request.param,
            max_model_len=1024,
            max_num_seqs=64,
            num_threads=1,
            block_size=16,
            num_gpu_blocks_override=64 * 64,  # every row's longest; a pool of its own choice is the whole GPU
        )
    )
    return made


def at_depth(core: EngineCore, depth: int) -> EngineCore:
    limits = replace(core.limits, async_scheduling=depth)
    return EngineCore(limits, core._executor, grammars=core._pending_grammars._service)


def requests(count: int, bound: bool, max_tokens: int) -> list[GenerateRequest]:
    made = []
    for number in range(count):
        answer = json_schema(SCHEMAS[NAMES[number % len(NAMES)]], "schema")
        grammar = turn_grammar(Frames(answer=answer, reasoning=(20, 5))) if bound else ""
        spec = SamplingSpec(
            grammar=grammar,
            seed=number,
            max_tokens=max_tokens,
            logit_bias=LOGIT_BIAS if bound else {},
            ignore_eos=not bound,
        )
        made.append(
            GenerateRequest(
                request_id=str(number), prompt_token_ids=[number, START, ASSISTANT], sampling=spec
            )
        )
    return made


def play(core: EngineCore, asked: list[GenerateRequest]) -> dict[str, tuple[list[int], str | None]]:
    tokens: dict[str, list[int]] = {each.request_id: [] for each in asked}
    ends: dict[str, str | None] = {}
    for each in asked:
        core.add_request(each)
    while core.has_work:
        for chunk in core.step():
            tokens[chunk.request_id] += chunk.token_ids
            ends[chunk.request_id] = chunk.error or chunk.finish_reason
    return {name: (ids, ends[name]) for name, ids in tokens.items()}


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_are_valid(core: EngineCore, depth: int) -> None:
    answers = play(at_depth(core, depth), requests(64, True, 700))
    for number in range(64):
        tokens, end = answers[str(number)]
        name = NAMES[number % len(NAMES)]
        assert end == "stop", (name, end, VOCAB.decode(tokens))
        text = VOCAB.decode(tokens[:-1]).rpartition("<|message|>")[2]
        assert valid(json.loads(text), SCHEMAS[name]), (name, text)


def test_overlap_gives_the_same_tokens_for_one_row(core: EngineCore) -> None:
    """One row: its logits do not depend on how a batch was cut."""
    for asked in requests(6, True, 300):
        assert play(at_depth(core, 0), [asked]) == play(at_depth(core, 1), [asked])


def test_what_it_costs(core: EngineCore) -> None:
    """Prints microseconds a step at 64 rows, free and bound; no bound is asserted, machines differ."""
    grammar = turn_grammar(Frames(answer=json_schema({"type": "object"}, "schema")))
    for depth in (0, 1):
        for name, text in (("free", ""), ("bound", grammar)):
            engine = at_depth(core, depth)
            spec = SamplingSpec(grammar=text, seed=1, max_tokens=150, ignore_eos=True)
            asked = [
                GenerateRequest(request_id=str(n), prompt_token_ids=[n, START, ASSISTANT], sampling=spec)
                for n in range(64)
            ]
            play(engine, [replaced(each, 20) for each in asked])
            start = time.perf_counter()
            answers = play(engine, asked)
            steps = max(len(tokens) for tokens, _ in answers.values())
            print(f"depth {depth} {name}: {(time.perf_counter() - start) / steps * 1e6:.0f} us a step")


def replaced(given: GenerateRequest, max_tokens: int) -> GenerateRequest:
    import msgspec

    spec = msgspec.structs.replace(given.sampling, max_tokens=max_tokens)
    return msgspec.structs.replace(given, sampling=spec)
