"""Finds the folder of a model: the demo, a folder on disk, or a hub id.

Hub downloads use huggingface_hub, which resumes interrupted downloads and honours ``HF_HOME``, ``HF_TOKEN``,
``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``. Only the needed files are fetched: the published layout, and
``original/`` only from a repository that has no other safetensors. A model of another family is refused
because of its ``config.json``, before anything else is fetched. No torch. Every failure is a ``ConfigError``
with a remedy.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chorale.config.engine import DEMO
from chorale.config.model_names import PUBLISHED, full_name
from chorale.errors import ConfigError
from chorale.model.config import MODEL_TYPES
from chorale.model.demo import ensure_demo, ensure_demo_head

Progress = Callable[[str, float, str], None]

LEASE_SECONDS = 60.0  # a lease expires after this silence; NFS may cache file attributes this long
_ONLY = f"only gpt-oss is served: {', '.join(PUBLISHED)} and their fine-tunes"
_A_MODEL = "the checkpoint's folder (with config.json and *.safetensors), or a model such as gpt-oss-20b"
_PUBLISHED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model*.safetensors",
)
_HEAD_FILES = ("config.json", "model.safetensors.index.json", "*.safetensors")
_REFERENCE_FILES = ("original/config.json", "original/*.safetensors")


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the folder of ``model``: "demo", a path, a hub id (``openai/gpt-oss-20b``) or its short name.

    ``revision`` is a branch, tag or commit of a hub id. ``download_dir`` replaces the hub cache. ``progress``
    is called with ("download", fraction, "1.20 of 13.80 GB, 110.0 MB/s"), at most ten times a second.
    """
    folder = None if model == DEMO else find_folder(model)
    if revision is not None and (model == DEMO or folder is not None):
        what = "the demo model ships inside the package" if folder is None else f"{folder} is a folder"
        raise ConfigError(f"--revision {revision}: {what}, which has no revisions")
    if model == DEMO:
        return ensure_demo(progress)
    if folder is not None:
        return folder
    repository = full_name(model)
    check_family(repository, revision=revision, download_dir=download_dir)
    return _download(repository, revision, download_dir, progress)


def resolve_head(
    name: str,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the folder of a draft head: "demo", a path, or a hub id (``nvidia/gpt-oss-120b-Eagle3-v3``).
    Arguments are those of ``resolve_model``."""
    if name == DEMO and revision is None:
        return ensure_demo_head(progress)
    folder = find_folder(name)
    if folder is not None:
        if revision is not None:
            raise ConfigError(f"revision {revision}: {folder} is a folder, which has no revisions")
        return folder
    with _alone("draft head", name, download_dir, progress):
        return _fetch(name, revision, download_dir, _HEAD_FILES, progress)


def find_folder(model: str) -> Path | None:
    """Returns the folder ``model``, or None if it can only be a hub id. A folder takes precedence over a
    short name.

    Raises ``ConfigError`` for a path that is not a folder, including a file.
    """
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder.resolve()
        is_file = folder.exists() and full_name(model) not in PUBLISHED
    except (OSError, RuntimeError) as fault:  # name too long, no permission; no such home
        raise ConfigError(f"model {model!r}: {fault}") from fault
    if is_file:
        is_yaml = folder.suffix in (".yaml", ".yml")
        remedy = f"for a configuration file use --config {model}" if is_yaml else f"name {_A_MODEL}"
        raise ConfigError(f"model {model!r} is a file, not a folder; {remedy}")
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"model {model!r}: no such folder")
    return None


def has_weights(folder: Path) -> bool:
    """Returns whether the folder has weight files, in either layout."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("original/*.safetensors"))


def check_family(
    repository: str, *, revision: str | None = None, download_dir: str | Path | None = None
) -> None:
    """Raises ``ConfigError`` if the repository's ``config.json`` describes a model other than gpt-oss.

    Also raises it if the repository is unavailable. One without the file, or with a file that has no type, is
    left to the code that reads it later.
    """
    if repository in PUBLISHED:
        return
    try:
        folder = _fetch(repository, revision, download_dir, ("config.json",), None)
        kind = json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
    except ConfigError as fault:
        raise ConfigError(f"model {repository!r}: {fault.message} ({_ONLY})") from fault
    except (OSError, ValueError, AttributeError):
        return
    if isinstance(kind, str) and kind not in MODEL_TYPES:
        raise ConfigError(f"model {repository!r} is of type {kind[:64]!r}: {_ONLY}")


def missing_bytes(
    repository: str, *, revision: str | None = None, download_dir: str | Path | None = None
) -> tuple[int, int] | None:
    """Return (bytes to download, bytes of all needed files), or None if the hub cannot be reached.

    Raises ``ConfigError``.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, HFValidationError, HTTPError  # type: ignore[attr-defined]

    def files(patterns: tuple[str, ...]) -> list[Any]:
        return snapshot_download(
            repository, revision=revision, cache_dir=download_dir, allow_patterns=list(patterns), dry_run=True
        )

    try:
        found = files(_PUBLISHED_FILES)
        if not any(file.filename.endswith(".safetensors") for file in found):
            found = files(_REFERENCE_FILES)
    except DryRunError:
        return None
    except (HFValidationError, HTTPError, OSError) as fault:
        raise ConfigError(f"model {repository!r}: {_explain(fault, revision)}") from fault
    missing = sum(file.file_size for file in found if file.will_download)
    return missing, sum(file.file_size for file in found)


def _download(
    model: str, revision: str | None, download_dir: str | Path | None, progress: Progress | None
) -> Path:
    with _alone("model", model, download_dir, progress):
        folder = _fetch(model, revision, download_dir, _PUBLISHED_FILES, progress)
        if not any(folder.glob("*.safetensors")):
            folder = _fetch(model, revision, download_dir, _REFERENCE_FILES, progress)
    if not has_weights(folder):
        raise ConfigError(f"model {model!r}: {folder} has no safetensors files")
    return folder


@contextlib.contextmanager
def _alone(
    kind: str, model: str, download_dir: str | Path | None, progress: Progress | None
) -> Iterator[None]:
    """A context in which no other process that shares the folder downloads this model. Errors name the model.

    The hub's locks use flock, which some network file systems apply to one machine only: two pods that start
    together would fetch the same weights into one volume. A lease only needs exclusive creation of a file.
    """
    from filelock import SoftFileLease, Timeout
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(download_dir or HF_HUB_CACHE) / ".locks" / f"models--{model.replace('/', '--')}"
    lease = SoftFileLease(folder / "download.lease", lease_duration=LEASE_SECONDS, poll_interval=0.5)
    while not lease.is_locked:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lease.acquire(timeout=1)
        except Timeout:
            if progress is not None:
                progress("download", 0.0, f"another process is downloading it and holds {lease.lock_file}")
        except (OSError, ValueError):  # a read-only volume; a name that no file can have
            break
    try:
        yield
    except ConfigError as fault:
        raise ConfigError(f"{kind} {model!r}: {fault.message}") from fault
    finally:
        lease.release()


def _fetch(
    model: str,
    revision: str | None,
    download_dir: str | Path | None,
    patterns: tuple[str, ...],
    progress: Progress | None,
) -> Path:
    """Return the snapshot's folder with the matching files. Raises ``ConfigError`` without the model's
    name."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # its client's

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(patterns),
                tqdm_class=_progress_bar(progress),
            )
        )
    except (HFValidationError, HTTPError, OSError) as fault:
        raise ConfigError(_explain(fault, revision)) from fault


def _explain(fault: Exception, revision: str | None) -> str:
    """Return the cause of a hub error and its remedy in one line; the hub's messages have many lines."""
    from huggingface_hub import errors

    if isinstance(fault, errors.HFValidationError):
        return "neither a folder nor a hub id (owner/name)"
    if isinstance(fault, errors.GatedRepoError):
        return "access to it must be granted on the hub first; then set HF_TOKEN"
    if isinstance(fault, errors.RevisionNotFoundError):
        return f"the hub has it, but not revision {revision!r}"
    if isinstance(fault, errors.RepositoryNotFoundError):
        return "no folder of that name, and not on the hub (if it is private, set HF_TOKEN)"
    # LocalEntryNotFoundError and IncompleteSnapshotError mean "offline".
    if isinstance(fault, FileNotFoundError) or type(fault).__name__ == "IncompleteSnapshotError":
        return (
            "not downloaded (or only in part), and huggingface.co cannot be reached "
            "(no network, or HF_HUB_OFFLINE is set); restore the connection, or give a folder"
        )
    if isinstance(fault, errors.HfHubHTTPError):
        status = fault.response.status_code if fault.response is not None else "no status"
        hint = "; is HF_TOKEN valid?" if status in (401, 403) else ""
        return f"the hub answered {status}{hint}"
    return f"download failed ({fault}); start again to resume it"


def _progress_bar(progress: Progress | None) -> Any:
    """Return a tqdm class that draws nothing and reports bytes to ``progress``.

    huggingface_hub makes several bars: one counts files, one or two count bytes (received, and written to
    disk). The bars of bytes share a reporter, which shows the most advanced bar.
    """
    from tqdm import tqdm

    reporter = _Reporter(progress)

    class ByteBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B":
                reporter.report(int(self.n), int(self.total or 0))
            return shown

    return ByteBar


class _Reporter:
    """Throttles progress reports, and turns bytes into a fraction and a line."""

    _INTERVAL = 0.1  # seconds

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._started = time.monotonic()
        self._last = 0.0
        self._most = 0

    def report(self, done: int, total: int) -> None:
        now = time.monotonic()
        if (
            self._progress is None
            or done < self._most
            or (now - self._last < self._INTERVAL and done < total)
        ):
            return
        self._last, self._most = now, done
        rate = done / max(now - self._started, 1e-3)
        message = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.1f} MB/s"
        self._progress("download", min(done / total, 1.0) if total else 0.0, message)
