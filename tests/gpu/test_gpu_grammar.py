"""Grammars on a GPU: masks arrive in time at either overlap depth, and bind. ``pytest -m gpu``."""

from __future__ import annotations

import json

import pytest

from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest
from chorale.grammar.constraint import json_schema
from chorale.grammar.frames import Frames, turn_grammar
from chorale.harmony.render import ASSISTANT
from chorale.harmony.vocab import START
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from tests.support import runtime
from tests.support.grammar.schema_cases import BIAS, SCHEMAS, VOCAB, valid

pytestmark = pytest.mark.gpu
NAMES = [name for name in SCHEMAS if name != "anything"]
LOGIT_BIAS = {int(token): bias for token, bias in BIAS.items()}


@pytest.fixture(scope="session", params=["reference", "triton"])
def core(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    config = make_config(layers=2, experts=4, hidden=64, inter=64, heads=4, kv_heads=2, head_dim=64)
    folder = write_random_checkpoint(tmp_path_factory.mktemp("model") / "random", config, seed=1)
    rooms = {"max_num_seqs": 64, "num_gpu_blocks_override": 64 * 64}  # blocks for every row's longest
    return runtime.make_engine(folder, device="cuda", ops=request.param, **rooms)


def requests(count: int, max_tokens: int) -> list[GenerateRequest]:
    made = []
    for number in range(count):
        answer = json_schema(SCHEMAS[NAMES[number % len(NAMES)]], "schema")
        grammar = turn_grammar(Frames(answer=answer, reasoning=(20, 5)))
        sampling = {"seed": number, "max_tokens": max_tokens, "logit_bias": LOGIT_BIAS, "ignore_eos": False}
        made.append(runtime.request(str(number), [number, START, ASSISTANT], grammar=grammar, **sampling))
    return made


def play(core: EngineCore, depth: int, asked: list[GenerateRequest]) -> dict[str, list[runtime.Answer]]:
    return runtime.run(runtime.with_drafter(core, None, async_scheduling=bool(depth)), asked)


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_are_valid(core: EngineCore, depth: int) -> None:
    answers = play(core, depth, requests(64, 700))
    for number in range(64):
        [answer] = answers[str(number)]
        name, tokens = NAMES[number % len(NAMES)], answer.token_ids
        assert answer.finish_reason == "stop", (name, answer.error, VOCAB.decode(tokens))
        text = VOCAB.decode(tokens[:-1]).rpartition("<|message|>")[2]
        assert valid(json.loads(text), SCHEMAS[name]), (name, text)


def test_overlap_gives_the_same_tokens_for_one_row(core: EngineCore) -> None:
    """One row: its logits do not depend on how a batch was cut."""
    for asked in requests(6, 300):
        serial, overlapping = (runtime.tokens_of(play(core, depth, [asked])) for depth in (0, 1))
        assert serial == overlapping
