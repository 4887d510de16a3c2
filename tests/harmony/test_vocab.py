"""The vocabulary: ids of the wire format, exactness and linearity of encoding, the two sources of ranks.

Times are CPU seconds of the calling thread, so that a busy machine does not fail a test.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
import tiktoken

from chorale.errors import ContextLengthError
from chorale.harmony import bpe
from chorale.harmony import vocab as v
from chorale.harmony.bpe import PIECE_PATTERN
from chorale.harmony.vocab import TokenIdError, Vocabulary, VocabularyError
from tests.harmony.conversations import WORDS
from tests.support.fuzz.worst_input import measure

GOLDEN = {
    "<|channel|>analysis<|message|>": [200005, 35644, 200008],
    "<|channel|>commentary<|message|>": [200005, 12606, 815, 200008],
    "<|channel|>final<|message|>": [200005, 17196, 200008],
    "<|end|><|start|>assistant<|channel|>final<|message|>": [200007, 200006, 173781, 200005, 17196, 200008],
    " <|constrain|>json<|message|>": [220, 200003, 4108, 200008],
    " json<|message|>": [5701, 200008],
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>": [
        *(200005, 12606, 815, 316, 28, 44580, 775, 170154, 220, 200003, 4108, 200008)
    ],
    "<|channel|>analysis to=browser.search code<|message|>": [
        *(200005, 35644, 316, 28, 46071, 16718, 3490, 200008)
    ],
    "<|channel|>analysis to=python code<|message|>": [200005, 35644, 316, 28, 29010, 3490, 200008],
    "<|start|>developer<|message|># Instructions\n\n": [200006, 77944, 200008, 2, 68406, 279],
    "【6†L9-L11】": [1805, 21, 78115, 43, 24, 9665, 994, 1813],
    "<|startoftext|><|endoftext|><|return|><|call|>": [199998, 199999, 200002, 200012],
    "<|reserved_200000|><|reserved_201087|>": [200000, 201087],
}


@pytest.fixture(scope="module")
def reference(vocab: Vocabulary) -> tiktoken.Encoding:
    ranks = {vocab.token_bytes(i): i for i in range(v.NUM_RANKS)}
    return tiktoken.Encoding("reference", pat_str=PIECE_PATTERN, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize("text", GOLDEN, ids=str)
def test_golden_ids(vocab: Vocabulary, text: str) -> None:
    assert vocab.encode_with_special(text) == GOLDEN[text]
    assert vocab.decode(GOLDEN[text]) == text


def test_text_is_never_special(vocab: Vocabulary) -> None:
    assert vocab.encode("<|end|>")[:4] == [27, 91, 419, 91]
    rng = random.Random(0)
    names = [v.special_name(i) for i in range(v.NUM_RANKS, v.VOCAB_SIZE)]
    for _ in range(2000):
        text = "".join(rng.choice([rng.choice(names), "a", " ", "\n", "日", "<|", "|>"]) for _ in range(8))
        ids = vocab.encode(text)
        assert max(ids) < v.NUM_RANKS
        assert vocab.decode(ids) == text


def test_names_of_every_special_id_go_both_ways(vocab: Vocabulary) -> None:
    ids = list(range(v.NUM_RANKS, v.VOCAB_SIZE))
    assert vocab.encode_with_special(vocab.decode(ids)) == ids
    assert all(vocab.is_special(i) for i in ids)
    assert not vocab.is_special(v.NUM_RANKS - 1)
    assert not vocab.is_special(v.VOCAB_SIZE)
    assert [i for i in ids if not v.special_name(i).startswith("<|reserved_")] == sorted(v.SPECIAL_NAMES)


def test_text_that_resembles_special_tokens_is_text(vocab: Vocabulary) -> None:
    """No name gives id 201,088, one past the model's rows, as openai-harmony's does."""
    for name in ("<|reserved_201088|>", "<|reserved_200002|>", "<|nothing|>"):
        text = f"say {name} twice<|end|>x"
        ids = vocab.encode_with_special(text)
        assert ids == [*vocab.encode(f"say {name} twice"), v.END, *vocab.encode("x")]


@pytest.mark.parametrize("bad", [-1, 201088, 300_000, 2**31, 2**70])
def test_ids_out_of_range_are_refused(vocab: Vocabulary, bad: int) -> None:
    for call in (vocab.token_bytes, lambda i: vocab.decode([5, i]), lambda i: vocab.decode_bytes([i])):
        with pytest.raises(TokenIdError, match=str(bad)):
            call(bad)


def test_lone_surrogates_become_replacement_characters(vocab: Vocabulary) -> None:
    assert vocab.decode(vocab.encode("a\ud800b")) == "a\ufffdb"
    assert vocab.decode(vocab.encode("\ud83d\ude00")) == "😀"
    assert vocab.decode(vocab.encode("a" * 5000 + "\udfff")) == "a" * 5000 + "\ufffd"


# --------------------------------------------------------------------------- encoding: exact and linear

ALPHABET = ["a", "A", "日", "é", " ", "\n", "\r", "\t", "1", "!", "/", "'", "😀", "\u0301",
            "\u3000", "-", "Ж", "ab", "the ",
            "\x1c", "'s", "\u200b", "²", "ⅷ", "ǅ", "ʰ", "\ufffd", "<|end|>", "\x85", "\u0378"]  # fmt: skip


def test_long_runs_give_the_ids_of_tiktoken(vocab: Vocabulary, reference: tiktoken.Encoding) -> None:
    rng = random.Random(1)
    for _ in range(400):
        parts = []
        for _ in range(rng.randint(1, 8)):
            if rng.random() < 0.7:
                parts.append(rng.choice(ALPHABET) * rng.choice([1, 1, 2, 3, 600, 700, 1500, 2500]))
            else:
                parts.append("".join(rng.choices(ALPHABET, k=rng.choice([3, 30, 800, 3000]))))
        text = "".join(parts)
        assert vocab.encode(text) == reference.encode_ordinary(text)


@pytest.mark.parametrize(
    "letters", ["abcdefghijklmnopqrstuvwxyz", "ab", "!-/=*#.,:;", " \t\n", "a日", "A日", "αβγ"]
)
def test_long_random_pieces_give_the_ids_of_tiktoken(
    vocab: Vocabulary, reference: tiktoken.Encoding, letters: str
) -> None:
    rng = random.Random(2)
    for size in (1536, 5000, 30_000):
        text = "".join(rng.choices(letters, k=size))
        assert vocab.encode(text) == reference.encode_ordinary(text)


def test_characters_that_one_table_lacks(vocab: Vocabulary, reference: tiktoken.Encoding) -> None:
    """Letters of the newest Unicode versions: symbols to a table that is older."""
    rng = random.Random(4)
    new = [chr(c) for c in range(0x250, 0x33480, 3) if unicodedata.ucd_3_2_0.category(chr(c)) == "Cn"]
    assert len(new) > 10_000
    for _ in range(100):
        some = rng.sample(new, 3)
        parts = (rng.choice([*some, "a", "1", "!", " ", "'s"]) * rng.choice([1, 2, 900]) for _ in range(12))
        text = "".join(parts)
        assert vocab.encode(text) == reference.encode_ordinary(text)


def test_long_ordinary_text_gives_the_ids_of_tiktoken(
    vocab: Vocabulary, reference: tiktoken.Encoding
) -> None:
    """Beyond the slices in which the C code is called; with few and with many places to cut."""
    rng = random.Random(9)
    for words in (
        WORDS,
        ["日本", "é", "1", "aB", "\n", "!?"],
        ["a ", "b  ", " \n", "c'", "'s", "d/", "\n/"],
        ["123"],
    ):
        text = "".join(rng.choices(words, k=150_000))
        assert vocab.encode(text) == reference.encode_ordinary(text)


@pytest.mark.parametrize("run", [1, 7, 500])
def test_text_without_a_certain_cut_gives_the_ids_of_tiktoken(
    vocab: Vocabulary, reference: tiktoken.Encoding, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices so small that most of them have none. Pieces depend on all that stands before them."""
    monkeypatch.setattr(bpe, "RUN", run)
    monkeypatch.setattr(bpe, "SLICE", 40)
    encoder = bpe.LinearEncoder(reference._core_bpe, [vocab.token_bytes(rank) for rank in range(v.NUM_RANKS)])
    rng = random.Random(5)
    mixes = [
        "1", "12\u0967", "'sS", "x'rEe", "¿é", "日。漢", "a\t", "!\u0301", "!\n\t", "\n/!", "aAbB",
        "😀a\u0378", " \n!1a'",
    ]  # fmt: skip
    for mix in mixes:
        for size in (1600, 3000):
            text = "".join(rng.choices(mix, k=size))
            assert encoder.encode(text) == reference.encode_ordinary(text), mix
            text = mix * (size // len(mix))
            assert encoder.encode(text) == reference.encode_ordinary(text), mix


@pytest.mark.parametrize(
    "pattern",
    [
        "¿é", "漢字。", "a\t", "1", "'s", "😀a", "!\u0301", "!\n\t", "x'rE", "aA", "\u0301", "<|a|>", "<|",
        "<|aaaaaaaaaa",
    ],
)  # fmt: skip
def test_text_above_the_limit_is_abandoned_early(vocab: Vocabulary, pattern: str) -> None:
    text = pattern * (4_000_000 // len(pattern.encode()))

    def encode() -> None:
        with pytest.raises(ContextLengthError):
            vocab.encode_with_special(text, 196_608)

    measure(encode, len(text.encode())).check(max_cpu_seconds=2)  # 0.4 s at most were measured


MEGABYTE = 1_000_000
RUNS = {
    "a": "a" * MEGABYTE,
    "one CJK character": "日" * (MEGABYTE // 3),
    "many CJK characters": "".join(chr(0x4E00 + i * 7919 % 20000) for i in range(MEGABYTE // 3)),
    "spaces": " " * MEGABYTE,
    "newlines": "\n" * MEGABYTE,
    "digits": "1" * MEGABYTE,
    "emoji": "😀" * (MEGABYTE // 4),
    "punctuation": "!" * MEGABYTE,
    # One unbroken piece that never repeats is the worst case: half as much takes as long.
    "random letters": "".join(random.Random(3).choices("abcdefghijklmnopqrstuvwxyz", k=MEGABYTE // 2)),
    "prose": "The quick brown fox, 42 years old, jumps over the lazy dog. " * (MEGABYTE // 60),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_megabyte_takes_less_than_100_ms(vocab: Vocabulary, name: str) -> None:
    """Measured on a shared 2-core machine: 4-20 ms for repeats, 30-70 ms for the rest. The bar is tripled."""
    text = RUNS[name]
    # Other processes evict a run from the caches: one of twelve without them is enough.
    assert any(_seconds(vocab, text) < 3 * 0.1 for _ in range(12))


def _seconds(vocab: Vocabulary, text: str) -> float:
    begin = time.thread_time()
    vocab.encode(text)
    return time.thread_time() - begin


# --------------------------------------------------------------------------- where the ranks come from


def test_export_is_what_the_variable_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = v.export_vocabulary(tmp_path / "made")
    assert path.name == "o200k_base.tiktoken"
    assert path.stat().st_size == 3_613_922
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(path.parent))
    assert v.load_vocabulary().encode("hello") == [24912]


def test_a_wrong_file_is_refused_with_both_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "o200k_base.tiktoken").write_bytes(b"IQ== 0\n")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    with pytest.raises(VocabularyError, match=rf"sha256 [0-9a-f]{{64}}, expected {v.RANKS_SHA256}"):
        v.load_vocabulary()


def test_without_the_file_the_built_in_vocabulary_is_used_and_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path / "missing"))
    for _ in range(2):
        assert v.load_vocabulary().encode("hello") == [24912]
    assert [record.levelname for record in caplog.records if record.name == v.__name__] == ["WARNING"]


def test_import_does_no_work() -> None:
    code = "import sys, chorale.harmony.parser, chorale.harmony.render; print(*sorted(sys.modules))"
    # Without what `make coverage` sets: measuring a process imports more than the process does.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout.split()
    assert not {"tiktoken", "regex", "torch", "socket", "ssl"} & set(loaded)


def test_loading_is_quick(vocab: Vocabulary) -> None:
    """Measured: 0.35-0.45 s alone. The bar is 0.6 s, here tripled."""
    begin = time.thread_time()
    Vocabulary(v.read_ranks())
    seconds = time.thread_time() - begin
    print(f"\nload: {seconds:.2f} s")
    assert seconds < 3 * 0.6


@pytest.mark.parametrize("window", [16, 64, 512])
def test_windows_that_disagree_are_not_joined(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up vocabulary whose merges run from right to left: where a window ends decides all its pairs."""
    letters = "abcdefghijklmnopqrstuvwxy"
    ranks = {bytes([byte]): byte for byte in range(256)}
    for place, pair in enumerate(zip(letters[::-1][1:], letters[::-1], strict=False)):
        ranks["".join(pair).encode()] = 256 + place  # "xy" merges first, "ab" last
    encoding = tiktoken.Encoding("made up", pat_str=PIECE_PATTERN, mergeable_ranks=ranks, special_tokens={})
    token_bytes = [encoding.decode_single_token_bytes(rank) for rank in range(len(ranks))]
    monkeypatch.setattr(bpe, "WINDOW", window)
    encoder = bpe.LinearEncoder(encoding._core_bpe, token_bytes)
    for text in (letters * 200, letters[3:] * 200, (letters + letters[:4]) * 100, letters[::-1] * 100):
        assert encoder.encode(text) == encoding.encode_ordinary(text)
