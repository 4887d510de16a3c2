"""The default model: a small trained gpt-oss checkpoint, so that a laptop can serve a model at once.

The wheel holds an archive of 11.44 MB (``chorale/data/demo.safetensors``), which is expanded once into an
ordinary checkpoint folder of 215 MB. How it was trained, and what it can do: ``training/README.md`` in the
repository. ``DEMO_NOTICE`` describes the model wherever it is shown. Its draft head, an EAGLE3 head of 1.3
million parameters with which drafts work on every laptop, is a smaller archive that is expanded likewise.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from chorale.errors import ConfigError

Progress = Callable[[str, float, str], None]

DEMO_NOTICE = (
    "demo is a small model for trying things out: it does sums, sorts lists, spells words, classifies "
    "sentiment, extracts names, fills in JSON and calls functions; it knows no facts about the world"
)
ARCHIVE = Path(__file__).parents[2] / "data" / "demo.safetensors"
SHA256 = "a91c0b6081d0a0759c3a841685b5dc5bfa5adeaa4da0c31750bdf33ee023de29"
HEAD_ARCHIVE = Path(__file__).parents[2] / "data" / "demo_head.safetensors"
HEAD_SHA256 = "85301dc4c1786e316a0a87b4be8c1d62bf707d48b9899133ea4934cdf13e1eff"
_NAME = f"demo-{SHA256[:12]}-3"  # changes with the weights and generation_config.json
_HEAD_NAME = f"demo-head-{HEAD_SHA256[:12]}-1"  # changes with the weights and config.json


def ensure_demo(progress: Progress | None = None, *, cache_dir: Path | None = None) -> Path:
    """Return the folder of the demo checkpoint, which is written on first use (a few seconds, 215 MB).

    ``cache_dir``: default ``$XDG_CACHE_HOME/chorale``, else ``~/.cache/chorale``. A temporary folder is
    written and renamed, so that a crash leaves no incomplete checkpoint and processes may race. Raises
    ``CheckpointError`` if the archive's hash is wrong, ``ConfigError`` if the folder cannot be written.
    """
    folder = (cache_dir if cache_dir is not None else default_cache_dir()) / _NAME
    if not (folder / "config.json").exists():
        if progress is not None:
            progress("download", 0.0, "unpacking the demo model (first start only)")
        ensure_folder(folder, _write)
    return folder


def ensure_demo_head(progress: Progress | None = None) -> Path:
    """Return the folder of the demo's draft head, which is written on first use (6 MB). Expands the demo
    checkpoint too.

    Raises the same errors as ``ensure_demo``.
    """
    demo = ensure_demo(progress)
    folder = default_cache_dir() / _HEAD_NAME
    if not (folder / "config.json").exists():
        ensure_folder(folder, lambda target: _write_head(target, demo))
    return folder


def ensure_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` with ``folder``. Raises ``ConfigError`` if it fails with an ``OSError``."""
    try:
        write(folder)
    except OSError as fault:
        hint = "set XDG_CACHE_HOME to use another folder"
        raise ConfigError(f"{folder}: the demo cannot be written there: {fault}; {hint}") from fault


def export_demo(folder: str | Path) -> Path:
    """Write the demo as an ordinary gpt-oss checkpoint into ``folder``, which must not exist or be empty.

    Raises ``FileExistsError`` if the folder is not empty.
    """
    target = Path(folder).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target}: exists already and is not empty")
    _write(target)
    return target


def _write(folder: Path) -> None:
    """Expand the archive into ``folder``."""
    # Imported here: the demo's name and notice are read without torch.
    from chorale.model.demo.archive import check_hash, expand

    check_hash(ARCHIVE, SHA256)
    write_folder(folder, lambda partial: expand(ARCHIVE, partial))


def _write_head(folder: Path, demo: Path) -> None:
    """Expand the head's archive into ``folder``."""
    from chorale.model.demo.archive import check_hash
    from chorale.model.demo.head_archive import expand_head

    check_hash(HEAD_ARCHIVE, HEAD_SHA256)
    write_folder(folder, lambda partial: expand_head(HEAD_ARCHIVE, demo, partial))


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a checkpoint into a temporary folder, then rename that to ``folder``. If another
    process was faster, keep its folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(partial)
        partial.chmod(0o755)  # mkdtemp makes private folders
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.rename(folder)
    except BaseException as fault:
        shutil.rmtree(partial, ignore_errors=True)
        is_there = (folder / "config.json").exists()  # another process was faster; its copy is the same
        if not (isinstance(fault, OSError) and is_there):
            raise


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chorale"
