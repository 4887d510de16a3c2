"""The corpus: a function of its seed, train and evaluation apart, and conversations that others can parse."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import openai_harmony
import pytest

from chorale.harmony.vocab import CALL, RANKS_DIR_VARIABLE, RETURN, START, export_vocabulary
from chorale.turns import compaction
from training.corpus import FAMILIES, MIXTURE, endings, fields, sample, structured, tool_phrases, wishes
from training.corpus.base import ASSISTANT, Dialogue, Draw, Phrases
from training.corpus.known import KNOWN
from training.corpus.links import link
from training.corpus.respell import Given
from training.corpus.wishes import WRAPS
from training.corpus.words import Split, pieces, vocabulary, words
from training.data import BatchShape, Packer
from training.evaluate import make_case, read, scores

FAMILY_FUNCTIONS = list(MIXTURE)
SPLITS: tuple[Split, ...] = ("eval", "hard")
WORD = re.compile(r"(?<![A-Za-z])[A-Z]?[a-z]+(?![A-Za-z])")


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai_harmony.HarmonyEncoding]:
    """openai-harmony, reading the vocabulary that we export (it would download one)."""
    folder = tmp_path_factory.mktemp("ranks")
    export_vocabulary(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RANKS_DIR_VARIABLE, str(folder))
        yield openai_harmony.load_harmony_encoding("HarmonyGptOss")


def test_a_sample_is_determined_by_its_seed() -> None:
    for seed in range(50):
        one, two = sample(seed).tokens(), sample(seed).tokens()
        assert one[0].tolist() == two[0].tolist()
        assert one[1].tolist() == two[1].tolist()
        assert sample(seed).family in FAMILIES


@pytest.mark.parametrize("split", ["eval", "hard"])
def test_word_pools_of_the_splits_are_disjoint(split: Split) -> None:
    for title in (False, True):
        train, held_out = set(words("train", title)), set(words(split, title))
        assert not train & held_out
        assert len(train) > 3000
        assert len(held_out) > 300
    assert not set(pieces("train")) & set(pieces(split))


def test_training_contains_no_held_out_word() -> None:
    """Neither in values nor in phrasings (a word of those is taken out of the pools)."""
    held_out = set(words("hard")) | set(pieces("hard")) | {word.lower() for word in words("hard", True)}
    said: Counter[str] = Counter()
    for seed in range(1500):
        text = vocabulary().decode(sample(10**9 + seed).tokens()[0].tolist())
        said.update(word.lower() for word in set(WORD.findall(text)))
    # A row of random letters may happen to be one, once.
    assert {word: n for word, n in said.items() if word in held_out and n > 1} == {}


def test_phrasings_of_the_splits_are_disjoint() -> None:
    """No held-out sentence of a well-known tool can be put together from what trains."""
    for kind in KNOWN:
        trained = sentences(kind.orders.train, WRAPS.train) | set(map(plain, kind.questions.train))
        orders, questions = kind.orders, kind.questions
        held_out = sentences(orders.held + orders.more, WRAPS.held + WRAPS.more)
        assert not trained & (held_out | set(map(plain, questions.held + questions.more)))
    for module in (fields, structured, tool_phrases, wishes):
        for value in vars(module).values():
            if isinstance(value, Phrases) and value is not tool_phrases.ORDERS:  # its wishes differ
                assert not set(map(plain, value.train)) & set(map(plain, value.held + value.more))


def test_no_training_link_is_held_out() -> None:
    held_out = set(fields._WAYS.held + fields._WAYS.more)
    random_draw = Draw(random.Random(3), "train")
    made = {link(random_draw, is_plain) for is_plain in (True, False) for _ in range(20_000)}
    assert not made & held_out
    assert len(made) > 10_000
    for unseen in (" ought ", "pick {v}", " being {v}"):
        assert not [pattern for pattern in made if unseen in f" {pattern}"]


def sentences(orders: tuple[str, ...], wraps: tuple[str, ...]) -> set[str]:
    return {plain(wrap.format(x=order, X=order)) for wrap in wraps for order in orders}


def plain(text: str) -> str:
    return text.rstrip(".?! ,").lower()


def test_number_pairs_and_prompts_are_disjoint() -> None:
    """No evaluation prompt of the numeric families occurs among many training ones."""
    for family in FAMILY_FUNCTIONS[3:6]:
        trained = {asked(sample(seed, "train", family)) for seed in range(1500)}
        tested = {asked(sample(seed, "eval", family)) for seed in range(300)}
        assert not trained & tested


def test_the_request_for_a_summary_is_the_servers() -> None:
    assert endings.REQUEST == compaction.REQUEST


def asked(dialogue: Dialogue) -> str:
    return str(dialogue.history[-1].content)


@pytest.mark.parametrize("family", FAMILY_FUNCTIONS, ids=lambda family: family.__name__)
def test_samples_parse_as_harmony(family: object, encoding: openai_harmony.HarmonyEncoding) -> None:
    for seed in range(8):
        dialogue = sample(seed, "train", family)  # type: ignore[arg-type]
        ids, learn = dialogue.tokens()
        parsed = encoding.parse_messages_from_completion_tokens(ids.tolist(), None)
        # Each message comes back; openai-harmony ends the last one at <|return|> as we do.
        assert len(parsed) == ids.tolist().count(START)
        assert parsed[0].author.role.value == "system"
        assert learn[-1]
        assert ids[-1] in (RETURN, CALL)


@pytest.mark.parametrize("family", FAMILY_FUNCTIONS, ids=lambda family: family.__name__)
def test_the_expected_answer_passes_all_checks(family: object) -> None:
    """The dialogue's own answer passes every check of the evaluation: the table can reach 100 %."""
    for seed, split in itertools.product(range(15), SPLITS):
        dialogue = sample(seed, split, family)  # type: ignore[arg-type]
        case = make_case(dialogue)
        for turn in turns(dialogue.tokens()[0].tolist(), len(dialogue.prompt())):
            read(case, turn)
        assert all(scores(case).values()), (vocabulary().decode(dialogue.tokens()[0].tolist()), scores(case))


def turns(ids: list[int], prompt_len: int) -> list[list[int]]:
    """What the model says in each of its turns: cut behind stop tokens, less what opens the turn."""
    found: list[list[int]] = []
    current: list[int] = []
    rest = ids[prompt_len:]
    at = 0
    while at < len(rest):
        if not current and rest[at] == START and rest[at + 1] != ASSISTANT:
            at += rest[at:].index(START, 1) if START in rest[at + 1 :] else len(rest)  # a tool's message
            while rest[at : at + 2] != [START, ASSISTANT]:
                at += 1
            continue
        if not current and rest[at : at + 2] == [START, ASSISTANT]:
            at += 2
        current.append(rest[at])
        if rest[at] in (RETURN, CALL):
            found.append(current)
            current = []
        at += 1
    return found


def test_targets_copy_the_given_tokens() -> None:
    encode, decode = vocabulary().encode, vocabulary().decode
    given = Given()
    given.add(encode("The zapia is Disposal, kwargs in a disposal"))
    assert given.encode('{"zapia":"') == [*encode('{"'), *encode("zap"), *encode("ia"), *encode('":"')]
    assert encode("zapia") != [*encode("zap"), *encode("ia")]
    assert given.encode('"disposal"') == encode('"disposal"')  # one token, which is spelt as usual
    assert given.encode(" zapia") == encode(" zapia")
    for text in (
        "Nobody said zapiaton.",
        "zapia2 and _zapia.kwargs",
        "  zapia\n",
        "don't (zapia)",
        "é zapia: 12",
    ):
        assert decode(given.encode(text)) == text


def test_targets_decode_to_their_text() -> None:
    for seed in range(300):
        dialogue = sample(seed)
        text = vocabulary().decode(dialogue.tokens()[0].tolist())
        for message in dialogue.target:
            assert isinstance(message.content, str)
            assert f"<|message|>{message.content}<|" in text


def test_batches_contain_whole_dialogues() -> None:
    corrected = np.arange(100, 300)
    shape = BatchShape(rows=2, seq_len=1024, num_learned=1024, num_classes=4096)
    batch = Packer(itertools.count(5), shape, corrected).batch()
    assert batch["token_ids"].shape == (2, 1024)
    learned = int((batch["weight"] > 0).sum())
    assert 100 < learned <= 1024
    assert batch["weight"].sum() == pytest.approx(1.0, abs=1e-4)
    assert (batch["classes"][batch["target_class"]] == batch["targets"]).all()
    assert len(set(batch["classes"].tolist())) == 4096
    flat = batch["token_ids"].ravel()
    assert (flat[batch["predict"][:learned] + 1] == batch["targets"][:learned]).all()
    starts = (batch["positions"] == 0) & (batch["token_ids"] == START)
    assert starts.sum() >= 4
