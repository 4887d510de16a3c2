"""``run.json``: the settings of a run, which decide whether a folder's journal can be continued."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from chorale.errors import ConfigError
from chorale.machine.folders import write_whole
from chorale.version import __version__

NAME = "run.json"


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task of a run. ``samples``: number of samples asked, after ``--limit``."""

    version: str
    data_revision: str = ""
    samples: int = 0
    metric: str = "accuracy"
    notes: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The settings of a run. On resume, ``settings`` and the id and root of ``server_model`` must be equal.

    ``server_model``: the model's entry in ``/v1/models``. ``tasks`` (by name), ``efforts``: asked so far.
    """

    settings: dict[str, Any]
    server_model: dict[str, Any]
    tasks: dict[str, TaskInfo]
    efforts: tuple[str, ...]
    base_url: str = ""
    started: str = ""
    chorale: str = __version__
    format: int = 1

    def continued_by(self, new: Manifest) -> Manifest:
        """Returns this manifest extended by ``new``. Raises ``ConfigError`` with the first difference."""
        before, after = (_compared(run, self.tasks.keys() & new.tasks.keys()) for run in (self, new))
        for what in {**before, **after}:
            if (old := before.get(what)) != (now := after.get(what)):
                raise ConfigError(
                    f"the folder holds a run with {what} {_say(old)}, and this one has {_say(now)}; "
                    "choose another --out"
                )
        efforts = tuple(dict.fromkeys((*self.efforts, *new.efforts)))
        return replace(new, tasks={**self.tasks, **new.tasks}, efforts=efforts, started=self.started)

    def write(self, folder: Path) -> None:
        """Writes the file atomically, so that a kill leaves the old or the new one."""
        value = asdict(replace(self, started=self.started or time.strftime("%Y-%m-%dT%H:%M:%S%z")))
        write_whole(folder / NAME, json.dumps(value, indent=1))


def _compared(run: Manifest, names: Iterable[str]) -> dict[str, Any]:
    """Returns the values that must not change in a run, with version and data of the tasks ``names``."""
    found = dict(run.settings) | {f"model {name}": run.server_model.get(name) for name in ("id", "root")}
    for name in names:
        task = run.tasks[name]
        found |= {f"version of {name}": task.version, f"data of {name}": task.data_revision}
    return found


def read_manifest(folder: Path) -> Manifest | None:
    """Returns a folder's manifest, None if it has none. Raises ``ConfigError`` for an unreadable one."""
    path = folder / NAME
    try:
        return msgspec.convert(json.loads(path.read_text("utf-8")), Manifest)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path}: not the settings of a run ({error})") from None


def _say(value: Any) -> str:
    return "none" if value in (None, "") else str(value)
