"""The demo's draft head: an EAGLE3 head of 1.3 million parameters, so that drafts work on every laptop.

The wheel holds an archive (``chorale/data/demo_head.safetensors``), which is expanded once into an ordinary
folder in the speculators format. Its training and its acceptance rate: ``training/README.md`` in the
repository.
"""

from __future__ import annotations

from pathlib import Path

from chorale.model.demo import Progress, default_cache_dir, ensure_demo, ensure_folder, write_folder

HEAD_ARCHIVE = Path(__file__).parents[2] / "data" / "demo_head.safetensors"
HEAD_SHA256 = "85301dc4c1786e316a0a87b4be8c1d62bf707d48b9899133ea4934cdf13e1eff"
_NAME = f"demo-head-{HEAD_SHA256[:12]}-1"  # changes with the weights and config.json


def ensure_demo_head(progress: Progress | None = None) -> Path:
    """Return the folder of the demo's draft head, which is written on first use (6 MB). Expands the demo
    checkpoint too.

    Raises the same errors as ``ensure_demo``.
    """
    demo = ensure_demo(progress)
    folder = default_cache_dir() / _NAME
    if not (folder / "config.json").exists():
        ensure_folder(folder, lambda target: _write(target, demo))
    return folder


def _write(folder: Path, demo: Path) -> None:
    """Expand the archive into ``folder``."""
    # Imported here: the name of the archive is read without torch.
    from chorale.model.demo.archive import check_hash
    from chorale.model.demo.head_archive import expand_head

    check_hash(HEAD_ARCHIVE, HEAD_SHA256)
    write_folder(folder, lambda partial: expand_head(HEAD_ARCHIVE, demo, partial))
