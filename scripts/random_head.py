"""Writes a draft head of the published size with random weights, for measurements. It drafts nonsense.

    python scripts/random_head.py --target 20b --style speculators FOLDER
    python scripts/random_head.py --target 120b --style midlayer --no-embedding --device cuda FOLDER

FOLDER gets ``config.json`` and ``model.safetensors`` (1.8 GB, without the embedding 0.6 GB).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from chorale.model.config_writer import SHAPES, make_config
from chorale.model.draft.config import published_head
from chorale.model.draft.writer import STYLES, write_random_head


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", choices=sorted(SHAPES), default="20b")
    parser.add_argument("--style", choices=STYLES, default="speculators")
    parser.add_argument("--no-embedding", action="store_true", help="the target's is used")
    parser.add_argument("--device", default="cpu", help="makes the numbers (default: cpu)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begin = time.monotonic()
    config = published_head(make_config(**SHAPES[given.target]))
    write_random_head(
        given.folder,
        config,
        style=given.style,
        seed=given.seed,
        device=given.device,
        embedding=not given.no_embedding,
    )
    size = sum(path.stat().st_size for path in given.folder.iterdir())
    print(f"{given.folder}: {size / 1e9:.2f} GB in {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
