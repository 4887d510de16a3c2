"""Random requests on the demo, with its own head and without: the same answers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chorale.config import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest, SamplingSpec
from chorale.harmony.vocab import load_vocabulary
from chorale.serve.engine.build import build_engine
from chorale.speculative.config import SpeculativeConfig
from tests.support.draft_worlds import check_equal
from tests.support.runtime import run, with_drafter

TASKS = (
    "What is {0} + {1}?",
    "What is {0} times {1}?",
    "List the numbers from {0} to {1}.",
    "Sort these words: pear, apple, fig, plum, kiwi {0} {1}",
    "Spell the word strawberry letter by letter.",
    "Name and city as JSON: My name is Anna Keller {0} and I live in Lisbon {1}.",
    "Is this sentence positive or negative? The food was great.",
)


def requests(count: int) -> list[GenerateRequest]:
    """Chats about what the demo knows, with all kinds of sampling."""
    rng, encode = random.Random(17), load_vocabulary().encode_with_special
    found = []
    for number in range(count):
        text = rng.choice(TASKS).format(rng.randint(1, 40), rng.randint(41, 99))
        sampling: dict[str, Any] = {
            "temperature": rng.choice((0.0, 0.7, 1.0)),
            "seed": rng.randrange(2**63),
            "max_tokens": rng.randint(20, 80),
            "top_p": rng.choice((1.0, 1.0, 0.9)),
            "top_k": rng.choice((0, 0, 30)),
            "min_p": rng.choice((0.0, 0.0, 0.05)),
            "presence_penalty": rng.choice((0.0, 0.0, 0.0, 0.5)),
            "logprobs": rng.choice((None, None, 2)),
            "n": rng.choice((1, 1, 1, 2)),
        }
        prompt = encode(f"<|start|>user<|message|>{text}<|end|><|start|>assistant")
        found.append(
            GenerateRequest(
                request_id=f"r{number}", prompt_token_ids=prompt, sampling=SamplingSpec(**sampling)
            )
        )
    return found


def engine(config: SpeculativeConfig | None) -> EngineCore:
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "num_threads": 1}
    core, _ = build_engine(
        EngineConfig(model="demo", **options, speculative_config=config, async_scheduling=True)
    )
    return core


@pytest.mark.slow
def test_the_demos_head_changes_no_answer() -> None:
    """Some of it, over HTTP, in ``test_drafts_change_no_answer.py``."""
    asked = requests(300)
    core = engine(SpeculativeConfig(method="eagle3", model="demo", num_speculative_tokens=4))
    expected = run(with_drafter(core, None), asked)
    found = run(core, asked)
    check_equal(found, expected)
    committer = core._scheduler.committer
    assert committer.num_accepted_tokens > 0.2 * committer.num_draft_tokens > 0
