"""The demo's draft head: trained as it is used, packed without loss; how its drafts are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorale.harmony.vocab import VOCAB_SIZE
from chorale.model.demo.head_archive import expand_head
from tests.model.draft.draft_files import HeadFile, angles_of, forward, states_of
from training.head.data import find_anchors
from training.head.evaluate import MOST, Tally
from training.head.export import from_published, read_head, write_head
from training.head.net import Chain, HeadNet, HeadShape, Sources, write_start

SHAPE = HeadShape(
    hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=16, intermediate_size=96, boundaries=(1, 2, 3)
)


@pytest.fixture(scope="module")
def unembedding() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(VOCAB_SIZE, SHAPE.hidden_size).bfloat16()


@pytest.fixture(scope="module")
def net(unembedding: torch.Tensor) -> HeadNet:
    torch.manual_seed(2)
    ids = torch.randperm(VOCAB_SIZE)[:300].sort().values
    net = HeadNet(SHAPE, ids, unembedding[ids], torch.arange(0, 300, 7))
    write_start(net, torch.tensor([1.0, 2.0, 4.0]), torch.ones(SHAPE.hidden_size))
    with torch.no_grad():
        for name in ("input_norm", "embed_norm", "hidden_norm", "mlp_norm", "norm"):
            getattr(net, name).mul_(1 + 0.2 * torch.randn(getattr(net, name).shape))
        net.map.add_(0.1 * torch.randn(net.map.shape))
        net.corrections.normal_()
    net.quantise, net.dtype = True, torch.float32
    return net


@pytest.fixture(scope="module")
def folder(net: HeadNet, unembedding: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head")
    write_head(net, path / "head.safetensors")
    save_file({"lm_head.weight": unembedding}, path / "model.safetensors")
    expand_head(path / "head.safetensors", path, path / "head")
    return path / "head"


def sources() -> tuple[Sources, torch.Tensor]:
    """Two documents in a row, and embeddings [30, H] of the token at each position."""
    torch.manual_seed(3)
    embedded = torch.randn(30, SHAPE.hidden_size)
    positions = torch.cat((torch.arange(18), torch.arange(12))).unsqueeze(0)
    states = torch.randn(1, 30, 3 * SHAPE.hidden_size) * 3
    return Sources(states, embedded.roll(-1, 0).unsqueeze(0), positions), embedded


def drafted(net: HeadNet, given: Sources, embedded: torch.Tensor, anchors: list[int]) -> torch.Tensor:
    """[steps, anchors, Vd] of four steps."""
    index = torch.tensor([anchors])
    with torch.no_grad():
        matrices = net.matrices()
        chain = Chain(net, matrices, given, index)
        found = [net.logits(chain.x, matrices)]
        for step in range(1, 4):
            chain.advance(embedded[index + 1 + step])
            found.append(net.logits(chain.x, matrices))
    return torch.cat(found)


@pytest.mark.parametrize(("anchor", "start"), [(9, 0), (13, 0), (22, 18), (18, 18)])
def test_the_trained_head_computes_the_forward_pass_of_the_format(
    folder: Path, anchor: int, start: int
) -> None:
    """The format's forward: that of heads of other people's files, one more token at each draft step."""
    net = from_published(folder)
    net.dtype = torch.float32
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    plain = HeadFile(
        {}, tensors, normed_residual=True, normed_output=True, angles=lambda n: angles_of(n, SHAPE.rope_theta)
    )
    given, embedded = sources()
    states = states_of(plain, given.states[0, start : anchor + 1])
    expected = []
    for _ in range(4):
        tokens = start + 1 + torch.arange(len(states))
        _, logits, following = forward(plain, states, tokens, embedded)
        expected.append(logits[-1])
        states = torch.cat((states, following[-1:]))
    found = drafted(net, given, embedded, [anchor])[:, 0]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_anchors_do_not_see_each_other(net: HeadNet) -> None:
    given, embedded = sources()
    together = drafted(net, given, embedded, [3, 9, 22])
    for place, anchor in enumerate((3, 9, 22)):
        alone = drafted(net, given, embedded, [anchor])[:, 0]
        torch.testing.assert_close(together[:, place], alone, rtol=1e-4, atol=1e-4)


def test_packing_loses_no_precision(net: HeadNet, unembedding: torch.Tensor, tmp_path: Path) -> None:
    restored = read_head(write_head(net, tmp_path / "head.safetensors"), unembedding)
    restored.dtype = torch.float32
    given, embedded = sources()
    expected, found = (drafted(one, given, embedded, [9, 22]) for one in (net, restored))
    assert (found - expected).norm() / expected.norm() < 0.01  # the map's rounding to bfloat16
    again = write_head(restored, tmp_path / "again.safetensors")
    assert again.read_bytes() == (tmp_path / "head.safetensors").read_bytes()


def test_the_expanded_head_equals_the_archives(net: HeadNet, folder: Path) -> None:
    published = from_published(folder)
    published.dtype = torch.float32
    given, embedded = sources()
    expected, found = (drafted(one, given, embedded, [9, 22]) for one in (net, published))
    assert (found - expected).norm() / expected.norm() < 0.02  # bfloat16
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(published.draft_ids, net.draft_ids)
    assert torch.equal(tensors["t2d"].nonzero().squeeze(1), net.draft_ids)


def test_anchors_are_the_positions_where_an_engine_drafts() -> None:
    """A conversation of an answer, words of someone else, and an answer; then another conversation."""
    token_ids = torch.tensor([[5, 6, 7, 8, 9, 1, 2, 7, 8, 9, 5, 6, 7, 8]])
    learned = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1]]).bool()
    positions = torch.tensor([[*range(10), *range(4)]])
    known = torch.ones(10, dtype=torch.bool)
    known[9] = False
    anchors = find_anchors(token_ids, positions, learned, known, (14, 2))
    found = {
        int(index): (targets.tolist(), valid.tolist())
        for index, targets, valid in zip(anchors.index[0], anchors.targets[0], anchors.valid[0], strict=True)
        if valid[0]
    }
    # The token after an anchor was sampled; 9 cannot be drafted, and ends what is learned after it.
    assert found == {
        1: ([8, 9], [True, False]),
        6: ([8, 9], [True, False]),
        10: ([7, 8], [True, True]),
        11: ([8, 0], [True, False]),
    }


def test_a_walk_counts_steps_and_tokens() -> None:
    """Seven tokens of an answer, of which the first is known: drafts after each of the next five."""
    table = torch.zeros(5, MOST, dtype=torch.bool)
    table[0, :2] = True  # after the first: two right
    table[3, :2] = True  # after the fourth: two right, and the end
    tally = Tally()
    tally.walk(table, 3)
    assert (tally.steps, tally.tokens, tally.kept) == (2, 6, [2, 2, 0, 0, 0])
    tally = Tally()
    tally.walk(table, 1)
    assert (tally.steps, tally.tokens) == (4, 6)
