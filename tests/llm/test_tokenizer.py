"""``LLM.get_tokenizer``: the results of transformers' fast tokenizer, built from the same ranks."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.harmony.bpe import PIECE_PATTERN
from chorale.harmony.vocab import NUM_RANKS, load_vocabulary
from chorale.llm.tokenizer import HarmonyTokenizer

TEXTS = [
    "Hello, world! It's 12345 o'clock.",
    "  Größe: 3 µm\n\n\tdéjà vu 世界 🙂🏽",
    "a<|end|>b<|start|>assistant<|message|> <|reserved_200001|>",
    "",
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <|end|>?"},
]


@pytest.fixture(scope="module")
def ours() -> HarmonyTokenizer:
    return HarmonyTokenizer(load_vocabulary(), 4096)


@pytest.fixture(scope="module")
def theirs(ours: HarmonyTokenizer) -> Any:
    """The tokenizer of the model's repository has this vocabulary, these merges and these added tokens."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    ids = ours.get_vocab()
    names = {number: name for name, number in ids.items()}
    ranks = {name: number for name, number in ids.items() if number < NUM_RANKS}
    merges = []
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (used, _), *_ = byte_level.pre_tokenize_str(" ".join(TEXTS))
    for name, number in ranks.items():  # a merge joins the two parts whose later rank is the lowest
        if name not in used:
            continue
        cuts = [(name[:i], name[i:]) for i in range(1, len(name))]
        known = [cut for cut in cuts if ranks.get(cut[0], number) < number > ranks.get(cut[1], number)]
        merges += [(number, max(ranks[a], ranks[b]), a, b) for a, b in known]
    model = tokenizers.models.BPE(ranks, [(a, b) for *_, a, b in sorted(merges)], ignore_merges=True)
    fast = tokenizers.Tokenizer(model)
    pieces, split = tokenizers.pre_tokenizers, tokenizers.Regex(PIECE_PATTERN)
    fast.pre_tokenizer = pieces.Sequence([pieces.Split(split, "isolated"), byte_level])
    fast.decoder = tokenizers.decoders.ByteLevel()
    added = [tokenizers.AddedToken(names[number], special=True) for number in range(NUM_RANKS, len(names))]
    fast.add_special_tokens(added)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<|startoftext|>", eos_token="<|return|>", pad_token="<|endoftext|>"
    )


def test_attributes_equal_those_of_transformers(ours: HarmonyTokenizer, theirs: Any) -> None:
    for name in (
        "bos_token", "bos_token_id", "eos_token", "eos_token_id", "pad_token", "pad_token_id", "vocab_size",
        "all_special_tokens", "all_special_ids", "unk_token", "padding_side", "is_fast",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs) == 200019
    assert ours.get_vocab() == theirs.get_vocab()


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_equal_those_of_transformers(
    ours: HarmonyTokenizer, theirs: Any, text: str
) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    split = {"split_special_tokens": True}
    assert ours.encode(text, **split) == theirs.encode(text, **split)
    assert max(ours.encode(text, **split), default=0) < NUM_RANKS
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        found = ours.convert_ids_to_tokens(ids, skip_special_tokens=skip)
        assert found == theirs.convert_ids_to_tokens(ids, skip_special_tokens=skip)
    assert ours.convert_tokens_to_ids(ours.convert_ids_to_tokens(ids)) == ids
    assert dict(ours(text)) == {name: theirs(text)[name] for name in ("input_ids", "attention_mask")}


def test_several_texts_and_single_ids(ours: HarmonyTokenizer, theirs: Any) -> None:
    assert ours(TEXTS).input_ids == theirs(TEXTS).input_ids  # type: ignore[attr-defined]
    assert ours.batch_decode([[64, 65], [200002]]) == theirs.batch_decode([[64, 65], [200002]])
    assert ours.decode(200002) == "<|return|>"
    assert ours.convert_ids_to_tokens(200018) == "<|endofprompt|>"
    assert ours.convert_tokens_to_ids("no such token") is None
    assert ours.decode([200002 - 1]) == "<|reserved_200001|>"


def test_a_template_never_reads_special_tokens_in_content(ours: HarmonyTokenizer) -> None:
    prompt = ours.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert prompt.count(200007) == 3  # <|end|> of the system, developer and user messages
    assert prompt[-2:] == [200006, 173781]  # <|start|>assistant
    assert ours.apply_chat_template(MESSAGES) == prompt[:-2]
    text = ours.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert text == ours.decode(prompt)
    assert ours.apply_chat_template([MESSAGES], return_dict=True)["input_ids"] == [prompt[:-2]]
    assert "Reasoning: high" in ours.apply_chat_template(MESSAGES, tokenize=False, reasoning_effort="high")


def test_an_argument_without_effect_may_only_ask_for_nothing(ours: HarmonyTokenizer) -> None:
    assert ours.encode("a", padding=False, truncation=None, return_tensors=None) == [64]
    with pytest.raises(ValueError, match="return_tensors"):
        ours("a", return_tensors="pt")
    with pytest.raises(TypeError, match="paddng"):
        ours.encode("a", paddng=True)
    with pytest.raises(ValueError, match="chat_template"):
        ours.apply_chat_template(MESSAGES, chat_template="{{ x }}")
