"""The app over the real engine, with a small random checkpoint that has the full vocabulary."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from chorale.config.engine import EngineConfig
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from chorale.serve.engine.build import build_engine
from tests.support.local_client import LocalClient
from tests.support.server import Server, served

SIZES: dict[str, Any] = {
    "layers": 2,
    "experts": 4,
    "hidden": 32,
    "inter": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "sliding_window": 32,
}


def write_checkpoint(folder: Path, seed: int = 1) -> Path:
    return write_random_checkpoint(folder, make_config(**SIZES), seed=seed)


def make_client(model: Path | str, **options: Any) -> LocalClient:
    settings = {"device": "cpu", "max_model_len": 4096, "max_num_seqs": 16, "num_threads": 1, **options}
    core, info = build_engine(EngineConfig(model=str(model), **settings))
    return LocalClient(core, info, max_queued_requests=4096)


def answering(client: Any, **options: Any) -> AbstractAsyncContextManager[Server]:
    return served(client, names=("demo",), system_start_date="2026-01-02", **options)
