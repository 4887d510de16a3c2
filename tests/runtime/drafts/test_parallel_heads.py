"""Engines whose DFlash or P-EAGLE head is a folder: the tokens are those without, and wrong settings fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chorale.config.speculative import SpeculativeConfig
from chorale.errors import ConfigError
from chorale.model.config import ModelConfig
from chorale.model.draft.config import Kind, small_head
from tests.support.device.draft_writer import write_random_head
from tests.support.runtime import make_engine, mixed_requests, run, tokens_of

CONFIGS: dict[Kind, SpeculativeConfig] = {
    "dflash": SpeculativeConfig(method="dflash", num_speculative_tokens=8),
    "peagle": SpeculativeConfig(method="eagle3", num_speculative_tokens=5, parallel_drafting=True),
}


def written(folder: Path, checkpoint: Path, kind: Kind, **changes: Any) -> SpeculativeConfig:
    model = ModelConfig.load(checkpoint)
    head = small_head(model, kind, aux_boundaries=(1, 2, model.num_hidden_layers), **changes)
    return replace(CONFIGS[kind], model=str(write_random_head(folder, head, embedding=False)))


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_are_those_without_drafts(kind: Kind, checkpoint: Path, tmp_path: Path) -> None:
    expected = tokens_of(run(make_engine(checkpoint), mixed_requests()))
    core = make_engine(checkpoint, speculative_config=written(tmp_path, checkpoint, kind))
    assert tokens_of(run(core, mixed_requests())) == expected
    assert core._scheduler.committer.num_draft_tokens > 0


def test_settings_that_do_not_fit_the_head(checkpoint: Path, tmp_path: Path) -> None:
    dflash = written(tmp_path / "dflash", checkpoint, "dflash", most_drafts=8)
    peagle = written(tmp_path / "peagle", checkpoint, "peagle")
    wrong = {
        "block_size": replace(dflash, num_speculative_tokens=9),
        "method dflash": replace(dflash, method="eagle3"),
        "method eagle3": replace(peagle, method="dflash", parallel_drafting=None),
        "parallel_drafting": replace(peagle, parallel_drafting=False),
    }
    for words, config in wrong.items():
        with pytest.raises(ConfigError, match=words):
            make_engine(checkpoint, speculative_config=config)
