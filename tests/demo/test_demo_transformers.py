"""Other engines load the demo: transformers gives the same greedy continuations as we do, in float32."""

from __future__ import annotations

import pytest
import torch

from chorale.harmony.vocab import START
from chorale.model.demo import ensure_demo
from tests.support.device.model import load_model
from tests.support.device.paged import PagedRunner, Sequence
from training.corpus import MIXTURE, sample
from training.corpus.base import ASSISTANT


def greedy(runner: PagedRunner, prompt: list[int], count: int) -> list[int]:
    sequence = Sequence(list(prompt))
    for _ in range(count):
        (logits,) = runner.step([(sequence, len(sequence.tokens) - sequence.computed)])
        sequence.tokens.append(int(logits[-1].argmax()))
    runner.release(sequence)
    return sequence.tokens[len(prompt) :]


def prompts(count: int) -> list[list[int]]:
    """Held-out conversations of every family."""
    families = list(MIXTURE)
    drawn = (sample(900_000 + index, "eval", families[index % len(families)]) for index in range(count))
    return [[*dialogue.prompt(), START, ASSISTANT] for dialogue in drawn]


@pytest.mark.parametrize(("count", "length"), [(4, 24), pytest.param(50, 64, marks=pytest.mark.slow)])
def test_greedy_continuations_agree(count: int, length: int) -> None:
    # Here, because every worker imports the tests, and this import takes two seconds.
    from transformers import GptOssForCausalLM, Mxfp4Config

    folder = ensure_demo()
    theirs = GptOssForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    ).eval()
    ours = PagedRunner(load_model(folder))
    for prompt in prompts(count):
        made = greedy(ours, prompt, length)
        # If each token is the best that follows those before it, their greedy continuation is the same.
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == made
