"""Other engines load the demo: transformers gives the same greedy continuations as we do, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chorale.harmony.vocab import START
from chorale.kernels import select_ops
from chorale.kernels.ops import AttentionMeta, ForwardBatch
from chorale.model.config import ModelConfig
from chorale.model.demo import ensure_demo
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import load_weights
from training.corpus import MIXTURE, sample
from training.corpus.base import ASSISTANT

PAGE = 16


class Ours:
    """The served model in float32, one sequence, greedy."""

    def __init__(self, folder: Path) -> None:
        self.config = ModelConfig.load(folder)
        ops = select_ops("reference", "cpu")
        weights = load_weights(folder, self.config, ops, device="cpu", dtype=torch.float32)
        self.model = GptOss(self.config, weights, ops, max_len=2048)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        pages = -(-(len(prompt) + count) // PAGE)
        size = (2 * pages, 2, self.config.num_key_value_heads, PAGE, self.config.head_dim)
        pools = [torch.zeros(size) for _ in range(self.config.num_kv_tensors)]
        new, computed, made = prompt, 0, []
        while True:
            logits = self.model.forward(self._batch(new, computed, pages), pools)
            made.append(int(logits[0].argmax()))
            if len(made) == count:
                return made
            computed, new = computed + len(new), made[-1:]

    def _batch(self, new: list[int], computed: int, pages: int) -> ForwardBatch:
        positions = torch.arange(computed, computed + len(new))
        tables = [torch.arange(pages, dtype=torch.int32).unsqueeze(0) + group * pages for group in range(2)]
        meta = AttentionMeta(
            positions=positions,
            query_start=torch.tensor([0, len(new)], dtype=torch.int32),
            context_lens=torch.tensor([computed + len(new)], dtype=torch.int32),
            block_tables=(tables[0], tables[1]),
            slots=(positions, positions + pages * PAGE),
            max_query_len=len(new),
            max_context_len=computed + len(new),
        )
        return ForwardBatch(torch.tensor(new), torch.tensor([len(new) - 1]), meta)


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
    ours = Ours(folder)
    for prompt in prompts(count):
        made = ours.greedy(prompt, length)
        # If each token is the best that follows those before it, their greedy continuation is the same.
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == made
