"""Weights read to a GPU by threads: every byte, in any cutting. ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chorale.errors import CheckpointError
from chorale.model.checkpoint import Checkpoint
from chorale.model.device_reader import DeviceReader
from tests.support.runtime import small_config, write_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("threads", "piece"), [(1, 97), (8, 4096), (8, 2**24)])
def test_every_tensor_arrives(tmp_path: Path, threads: int, piece: int) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "model"), small_config())
    reader = DeviceReader(checkpoint, torch.device("cuda"), threads, piece)
    places = [(layer, spec.role) for layer in (0, 3, None) for spec in checkpoint.specs(layer)]
    arrivals = {place: reader.start(*place) for place in places}
    for place, arrival in arrivals.items():
        assert torch.equal(arrival.wait().cpu(), checkpoint.read(*place)), place
    reader.close()


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "model"), small_config())
    reader = DeviceReader(checkpoint, torch.device("cuda"))
    file, _ = checkpoint.locate(None, "head")
    with file.path.open("r+b") as opened:
        opened.truncate(1000)
    with pytest.raises(CheckpointError, match="became shorter"):
        reader.start(None, "head").wait()
    reader.close()
