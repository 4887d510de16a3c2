"""Writes the requirements of the image with their hashes: `python scripts/lock_requirements.py`.

Needs the program uv and a package registry, whose address is not written. `deploy/requirements.txt` is for
both targets of the image. `deploy/requirements-cuda.txt` has torch and its CUDA libraries: CPU builds come
from PyTorch's index with other hashes, so the target cpu uses only the torch version of this file.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("postgres", "python-tool", "s3", "pdf", "otel")
CUDA = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
HEAD = "# python scripts/lock_requirements.py: pyproject.toml for the image (Linux, x86-64, Python 3.12)\n"


def resolve() -> str:
    """Returns all packages with versions and hashes, as printed by uv."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    command = [
        uv,
        "pip",
        "compile",
        "pyproject.toml",
        "--generate-hashes",
        "--no-annotate",
        "--no-header",
        "--quiet",
    ]
    command += ["--no-emit-index-url", "--python-version=3.12", "--python-platform=x86_64-manylinux_2_28"]
    command += [f"--extra={extra}" for extra in EXTRAS]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    packages = re.findall(r"^\S+==\S+ \\\n(?:    --hash=.+\n)+", resolve(), re.MULTILINE)
    for name, is_cuda in (("requirements.txt", False), ("requirements-cuda.txt", True)):
        chosen = [each for each in packages if bool(CUDA.match(each)) == is_cuda]
        (ROOT / "deploy" / name).write_text(HEAD + "".join(chosen), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
