"""The flags of host memory for KV, under vLLM's names."""

from __future__ import annotations

import pytest

from chorale.cli.main import main
from chorale.config.options.settings import merge
from chorale.errors import ConfigError


def test_the_size_can_be_set_by_its_older_name() -> None:
    assert merge(["demo"], {}).engine.kv_offloading_size is None
    found = merge(["demo", "--kv-offloading-size", "2.5", "--kv-offloading-backend", "native"], {})
    assert (found.engine.kv_offloading_size, found.notices) == (2.5, ())
    found = merge(["demo", "--swap-space", "16"], {})
    assert found.engine.kv_offloading_size == 16
    assert found.notices == (
        "--swap-space (command line) is accepted and taken as --kv-offloading-size 16: "
        "sequences are not swapped",
    )
    both = merge(["demo", "--swap-space", "16", "--kv-offloading-size", "0"], {})
    assert both.engine.kv_offloading_size == 0
    assert merge(["demo", "--swap-space", "0"], {}).notices == ()


def test_other_connectors_are_refused() -> None:
    with pytest.raises(ConfigError, match="connectors are not supported"):
        merge(["demo", "--kv-offloading-backend", "lmcache"], {})


def test_fit_shows_both_memories(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "120b", "--gpu", "h200", "--kv-offloading-size", "64"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("host KV")]
    # A page of 64 tokens is 2.25 MiB: 18 tensors of K and V, 8 heads of 64 numbers in bfloat16.
    assert "64.00 GiB of host memory for 29127 pages" in line
    assert "0.62 GiB of GPU memory for copies" in line
    assert main(["fit", "120b", "--gpu", "h200"]) == 0
    assert "host KV" not in capsys.readouterr().out


def test_fit_shows_the_share_of_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "120b", "--gpu", "h200", "--kv-offloading-size", "64", "-tp", "2"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("host KV")]
    assert "32.00 GiB of host memory for 29127 pages" in line
