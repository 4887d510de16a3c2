"""Writes the table of kernels compiled for consumer GPUs into docs/lab/kernels.md. Needs Triton, but no GPU.

    python scripts/kernel_table.py [FOLDER]

Compiles the kernels of a 20b server without options for each GPU (a minute each on an idle machine), or reads
the outputs of ``compile_kernels.py GPU default -v`` from FOLDER/GPU.txt.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lab" / "kernels.md"
GPUS = {"rtx-a4000": "sm_86", "rtx-4080": "sm_89", "rtx-5080": "sm_120", "dgx-spark": "sm_121"}
LINE = re.compile(r"^(\S+) +shared +(\d+) registers +(\d+) spilled +(\d+)$", re.MULTILINE)
START, END = "<!-- consumer kernels -->", "<!-- /consumer kernels -->"


def compiled(gpu: str) -> str:
    command = [sys.executable, "-m", "tests.support.kernels.compile_kernels", gpu, "default", "-v"]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    return subprocess.run(command, env=settings, cwd=ROOT, text=True, capture_output=True, check=True).stdout


def table(outputs: dict[str, str]) -> str:
    """Returns the table: of each kernel's variants, the most shared memory, registers and spills."""
    found: dict[str, dict[str, list[tuple[int, int, int]]]] = defaultdict(lambda: defaultdict(list))
    for gpu, text in outputs.items():
        for name, *numbers in LINE.findall(text):
            shared, registers, spilled = map(int, numbers)
            found[name.replace("._", ".").removesuffix("_kernel")][gpu].append((shared, registers, spilled))
    lines = [
        f"| kernel | variants | {' | '.join(GPUS[gpu] for gpu in outputs)} |",
        "|---" * (len(outputs) + 2) + "|",
    ]
    for name, by_gpu in sorted(found.items()):
        cells = [
            "{:,} · {} · {}".format(*map(max, zip(*by_gpu[gpu], strict=True))) if gpu in by_gpu else "-"
            for gpu in outputs
        ]
        lines.append(f"| {name} | {max(map(len, by_gpu.values()))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    outputs = {
        gpu: compiled(gpu) if folder is None else (folder / f"{gpu}.txt").read_text("utf-8") for gpu in GPUS
    }
    before, rest = PAGE.read_text("utf-8").split(START)
    PAGE.write_text(f"{before}{START}\n{table(outputs)}\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
