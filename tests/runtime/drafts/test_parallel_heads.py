"""Engines whose DFlash or P-EAGLE head is a folder: the tokens are those without, and wrong settings fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chorale.config.speculative import SpeculativeConfig
from chorale.errors import ConfigError
from chorale.model.draft.config import Kind
from tests.model.draft.test_parallel import dflash, peagle
from tests.support.runtime import make_engine, mixed_requests, run, tokens_of

CONFIGS: dict[Kind, SpeculativeConfig] = {
    "dflash": SpeculativeConfig(method="dflash", num_speculative_tokens=8),
    "peagle": SpeculativeConfig(method="eagle3", num_speculative_tokens=5, parallel_drafting=True),
}


def written(folder: Path, kind: Kind) -> SpeculativeConfig:
    """Writes a head without the matrix that it shares with its target."""
    file, shared = (dflash(), "lm_head.weight") if kind == "dflash" else (peagle(), "embed_tokens.weight")
    del file.tensors[shared]
    return replace(CONFIGS[kind], model=str(file.write(folder)))


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_are_those_without_drafts(kind: Kind, checkpoint: Path, tmp_path: Path) -> None:
    expected = tokens_of(run(make_engine(checkpoint), mixed_requests()))
    core = make_engine(checkpoint, speculative_config=written(tmp_path, kind))
    assert tokens_of(run(core, mixed_requests())) == expected
    assert core.stats().num_draft_tokens > 0


def test_settings_that_do_not_fit_the_head(checkpoint: Path, tmp_path: Path) -> None:
    block, eagle = written(tmp_path / "dflash", "dflash"), written(tmp_path / "peagle", "peagle")
    wrong = {
        "block_size": replace(block, num_speculative_tokens=9),
        "method dflash": replace(block, method="eagle3"),
        "method eagle3": replace(eagle, method="dflash", parallel_drafting=None),
        "parallel_drafting": replace(eagle, parallel_drafting=False),
    }
    for words, config in wrong.items():
        with pytest.raises(ConfigError, match=words):
            make_engine(checkpoint, speculative_config=config)
