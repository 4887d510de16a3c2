"""Acceptance in the results of chorale bench: vLLM's lines and keys, from counters before and after."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from chorale.api.telemetry.metrics import Metrics
from chorale.cli.commands.measure.bench_offline import _conclude, described
from chorale.client.base import EngineInfo, EngineStatus
from chorale.config.speculative import SpeculativeConfig
from chorale.engine.types import EngineStats
from chorale.measure.bench.drafts import SYNTHETIC, DraftCounts
from chorale.measure.bench.metrics import block, summarise

INFO = EngineInfo(model="m", max_model_len=1, max_num_seqs=1, num_speculative_tokens=3)
BEFORE = EngineStats(
    num_drafts=10, num_draft_tokens=30, num_accepted_tokens=9, accepted_per_position=(9,), num_steps=20
)
AFTER = EngineStats(
    num_drafts=110,
    num_draft_tokens=330,
    num_accepted_tokens=177,
    accepted_per_position=(89, 58, 30),
    num_steps=300,
)
LINES = """---------------Speculative Decoding---------------
Acceptance rate (%):                     56.00
Acceptance length:                       2.68
Drafts:                                  100
Draft tokens:                            300
Accepted tokens:                         168
Per-position acceptance (%):
  Position 0:                            80.00
  Position 1:                            58.00
  Position 2:                            30.00
"""


class Engine:
    """The attributes of a client that a scrape reads. Each of its engines is this object too."""

    def __init__(self, stats: EngineStats, info: EngineInfo = INFO, count: int = 1) -> None:
        self.stats, self.info = stats, info
        self.status = EngineStatus("ready")
        self.engines = (self,) * count


def scraped(stats: EngineStats, info: EngineInfo = INFO, count: int = 1) -> DraftCounts | None:
    metrics = Metrics("demo")
    metrics.watch(Engine(stats, info, count))  # type: ignore[arg-type]
    return DraftCounts.of_metrics(metrics.render().decode())


def printed(drafts: DraftCounts) -> str:
    text = block(summarise([], 1.0), rate=1.0, concurrency=None, metrics=[], percentiles=[], drafts=drafts)
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_counts_from_metrics_equal_those_of_the_engine() -> None:
    before, after = scraped(BEFORE), scraped(AFTER)
    assert before is not None
    assert after is not None
    between = after.since(before)
    assert between == DraftCounts.of_engine(AFTER).since(DraftCounts.of_engine(BEFORE))
    assert LINES in printed(between)
    assert between.to_json() == {
        "spec_decode_acceptance_rate": pytest.approx(56.0),
        "spec_decode_acceptance_length": pytest.approx(2.68),
        "spec_decode_num_drafts": 100,
        "spec_decode_draft_tokens": 300,
        "spec_decode_accepted_tokens": 168,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.58, 0.3],
    }
    both = scraped(AFTER, count=2)
    assert both is not None
    assert (both.drafts, both.per_position) == (220, (178, 116, 60))


def test_a_server_without_drafts_has_no_section() -> None:
    assert scraped(AFTER, msgspec.structs.replace(INFO, num_speculative_tokens=0)) is None
    assert DraftCounts().to_json() == {}


def test_synthetic_acceptance_is_in_every_line() -> None:
    drafts = scraped(AFTER, msgspec.structs.replace(INFO, synthetic_acceptance=True))
    assert drafts is not None
    assert drafts.since(DraftCounts()).to_json()["synthetic_acceptance"] is True
    lines = printed(drafts).splitlines()[:-1]
    assert len(lines) > 10
    assert all(SYNTHETIC in line for line in lines)


def test_offline_benchmarks_report_synthetic_acceptance(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    acceptance = (0.8, 0.5)
    config = SpeculativeConfig(method="synthetic", num_speculative_tokens=2, acceptance=acceptance)
    about = described(INFO, config)
    assert "the output has no meaning" in capsys.readouterr().out
    path = tmp_path / "result.json"
    _conclude("latency", {"avg_latency": 1.5, "batch_size": 2}, path, **about)
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert lines
    assert all(SYNTHETIC in line for line in lines)
    written = json.loads(path.read_text())
    assert written["synthetic_acceptance"] is True
    assert written["speculative_config"]["acceptance"] == [0.8, 0.5]
    assert "synthetic_acceptance" not in described(INFO, None)
