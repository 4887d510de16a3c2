"""What is trained is what is served: the training ops against the reference ops and the MXFP4 encoder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import training.features
from chorale.harmony.vocab import VOCAB_SIZE, load_vocabulary
from chorale.kernels import mxfp4
from chorale.model.config import ModelConfig
from chorale.model.demo import archive
from chorale.model.demo.features import NUM_FEATURES, PIECE_DIMS, feature_parts, other_forms
from tests.support.device.demo_features import features_once
from tests.support.device.model import load_model
from tests.support.device.paged import PagedRunner
from training.export import write_archive
from training.features import token_features
from training.init import write_heads
from training.net import DemoNet
from training.ops import nearest_mxfp4


@pytest.fixture(scope="module", autouse=True)
def same_features() -> Iterator[None]:
    with features_once(training.features, archive):
        yield


@pytest.fixture(scope="module")
def token_bytes() -> list[bytes]:
    vocab = load_vocabulary()
    return [vocab.token_bytes(i) for i in range(VOCAB_SIZE)]


# Two documents, one longer than the window, and the tokens whose scores are compared: all would take minutes.
DOCUMENTS = [np.random.default_rng(size).integers(0, 100_000, size).tolist() for size in (170, 30)]
SOME = torch.arange(0, VOCAB_SIZE, 41)


@pytest.fixture(scope="module")
def net(token_bytes: list[bytes]) -> DemoNet:
    torch.manual_seed(5)
    used = np.concatenate((*DOCUMENTS, SOME))
    features = torch.zeros(VOCAB_SIZE, NUM_FEATURES, dtype=torch.bfloat16)
    features[used] = torch.from_numpy(token_features(token_bytes, used)).bfloat16()
    net = DemoNet(archive.demo_config(), features, torch.arange(100, 400))
    write_heads(net)
    with torch.no_grad():
        net.embed_d.normal_(std=0.1)
        net.unembed_d.normal_(std=0.1)
        net.unembed_w *= 3
    net.quantise = True
    return net


@pytest.fixture(scope="module")
def folder(net: DemoNet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net")
    write_archive(net, path / "archive.safetensors")
    archive.expand(path / "archive.safetensors", path / "checkpoint")
    return path / "checkpoint"


def test_mxfp4_rounding_equals_the_encoders() -> None:
    torch.manual_seed(1)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4)
    random = torch.randn(64, 96) * torch.exp(torch.randn(64, 1) * 4)
    for weight in (random, ties, -ties, torch.zeros(32), ties * 2**-20):
        expected = mxfp4.dequantize(*mxfp4.quantize(weight), torch.float32)
        assert torch.equal(nearest_mxfp4(weight), expected)


def test_training_and_serving_agree(net: DemoNet, folder: Path) -> None:
    """Two documents in one packed row; served apart, from the archive."""
    token_ids = torch.tensor([DOCUMENTS[0] + DOCUMENTS[1]])
    positions = torch.cat([torch.arange(len(row)) for row in DOCUMENTS]).unsqueeze(0)
    with torch.no_grad():
        hidden = net(token_ids, positions, torch.arange(200))
        table = net.table("unembed")(SOME)
        trained = hidden.bfloat16().float() @ table.float().mT
    model = load_model(folder)
    served = torch.cat([PagedRunner(model).run(row) for row in DOCUMENTS])[:, SOME]
    error = (trained - served).norm(dim=-1) / served.norm(dim=-1)
    # bfloat16 rounding; a router that chooses another expert for a nearly equal score moves a token more.
    assert error.median() < 0.02
    assert (error < 0.1).float().mean() > 0.9


def test_parts_give_the_same_features(token_bytes: list[bytes]) -> None:
    some = token_bytes[::97]
    parts = feature_parts(some)
    features = token_features(some)
    assert features.shape == (len(some), NUM_FEATURES)
    assert np.array_equal(features[:, parts.columns_own], parts.own)
    assert np.array_equal(features[:, parts.columns_of_core], parts.of_core[parts.core_ids])
    for columns, rows in zip(parts.columns_of_piece, parts.piece_ids, strict=True):
        assert np.array_equal(features[:, columns], parts.of_piece[rows])
    filled = [*parts.columns_own, *parts.columns_of_core, *parts.columns_of_piece.ravel()]
    assert sorted(filled) == list(range(NUM_FEATURES))


@pytest.mark.slow
def test_features_of_other_forms_match_the_tokenizer(token_bytes: list[bytes]) -> None:
    """Every other form is the tokenizer's own, and its pieces have the bits of the tokens that they are."""
    vocab, forms = load_vocabulary(), other_forms(token_bytes)
    for index in range(0, 199_000, 97):
        pieces = [piece for piece in forms[index].tolist() if piece >= 0]
        if pieces:
            word = token_bytes[index].decode()
            expected = vocab.encode(word[1:] if word[0] == " " else f" {word}")
            assert pieces == expected[: len(pieces)]
            assert len(expected) >= 2
    (disposal,) = vocab.encode(" disposal")
    spelt = vocab.encode("disposal")
    assert forms[disposal].tolist() == [*spelt, -1]
    assert forms[vocab.encode(" weather")[0]].tolist() == [-1, -1, -1]  # "weather" is one token, too
    parts = feature_parts(token_bytes)
    features = token_features(token_bytes)
    for columns, piece in zip(parts.columns_of_piece, spelt, strict=False):
        codes, cores = features[disposal, columns], features[piece, :PIECE_DIMS]
        assert np.array_equal(np.sign(codes), np.sign(cores))


def test_the_config_equals_the_demos(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    loaded = ModelConfig.load(folder)
    wanted = archive.demo_config()
    assert dataclasses.replace(loaded, default_sampling={}) == dataclasses.replace(
        wanted, eos_token_ids=loaded.eos_token_ids, max_position_embeddings=loaded.max_position_embeddings
    )
    assert raw["architectures"] == ["GptOssForCausalLM"]
