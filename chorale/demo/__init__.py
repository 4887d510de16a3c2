"""The default model: a small gpt-oss checkpoint, so that a laptop serves something without a download.

Until a trained one ships, it is random: every part of the engine runs as it does for the real models, and
what it says means nothing. ``DEMO_NOTICE`` says so wherever the model is shown.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

DEMO_NOTICE = (
    "demo: a small gpt-oss checkpoint with random weights; it exercises the whole server, "
    "but what it says means nothing"
)
_NAME = "demo-random-v2"  # a new name whenever the weights change


def ensure_demo(
    progress: Callable[[str, float, str], None] | None = None, *, cache_dir: Path | None = None
) -> Path:
    """The folder of the demo checkpoint, written there on first use (about 1 s, 110 MB).

    ``cache_dir``: default ``$XDG_CACHE_HOME/chorale``, else ``~/.cache/chorale``. Written beside and renamed,
    so that a crash leaves no half checkpoint and two processes may race.
    """
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    folder = cache / _NAME
    if (folder / "config.json").exists():
        return folder
    if progress is not None:
        progress("load", 0.0, "writing the demo checkpoint (random weights)")
    # Imported here: the demo's name and notice are read where torch is not.
    from chorale.model.checkpoint_writer import write_random_checkpoint
    from chorale.model.config_writer import make_config

    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{_NAME}-", dir=cache))
    try:
        config = make_config(layers=4, experts=8, hidden=128, inter=128, heads=8, kv_heads=2, head_dim=32)
        write_random_checkpoint(partial, config, seed=20)
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not (folder / "config.json").exists():  # else another process was first: its copy is the same
            raise
    return folder


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chorale"
