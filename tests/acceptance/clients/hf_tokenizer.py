"""The vocabulary in the format of transformers, for clients that count tokens themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

from chorale.harmony import vocab
from chorale.harmony.bpe import PIECE_PATTERN
from chorale.model.demo import ensure_demo


def write_tokenizer(folder: Path) -> Path:
    """Writes a folder that ``AutoTokenizer`` opens, and returns it."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    names = [vocab.special_name(token) for token in range(vocab.NUM_RANKS, vocab.VOCAB_SIZE)]
    ranks = str(vocab.export_vocabulary(folder / "ranks"))
    made = TikTokenConverter(ranks, pattern=PIECE_PATTERN, extra_special_tokens=names).converted()
    ends = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"}  # as in the published file
    found = PreTrainedTokenizerFast(tokenizer_object=made, **ends)
    text = "Hello 123456 wörld <|start|>user"
    assert found.encode(text) == vocab.load_vocabulary().encode_with_special(text)
    found.save_pretrained(folder)
    shutil.copy(ensure_demo() / "config.json", folder)
    return folder
