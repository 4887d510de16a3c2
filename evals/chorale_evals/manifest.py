"""``run.json``: the settings of a run. Decides whether a folder's journal can be continued."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chorale.machine.folders import write_whole
from chorale.version import __version__
from chorale_evals.errors import JournalError

FORMAT = 1
NAME = "run.json"


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task of a run. ``samples``: how many are asked, which ``limit`` may have reduced."""

    version: str
    data_revision: str = ""
    samples: int = 0
    metric: str = "accuracy"
    notes: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """``settings`` are compared on resume, and of ``server_model`` (its entry in the list of models) a part.

    ``tasks``: name -> task; ``efforts``: those asked so far. Both only grow.
    """

    settings: Mapping[str, Any]
    server_model: Mapping[str, Any]
    tasks: Mapping[str, TaskInfo]
    efforts: tuple[str, ...]
    base_url: str = ""
    started: str = ""
    chorale: str = __version__
    format: int = FORMAT
    prices: Mapping[str, float | None] = field(default_factory=dict)

    def continued_by(self, new: Manifest) -> Manifest:
        """Returns the manifest of both. Raises ``JournalError`` that names a difference, if there is one."""
        for what, old_value, new_value in self._differences(new):
            raise JournalError(
                f"the folder holds a run with {what} {_say(old_value)}, and this one has {_say(new_value)}; "
                "choose another --out"
            )
        efforts = tuple(dict.fromkeys((*self.efforts, *new.efforts)))
        return replace(new, tasks={**self.tasks, **new.tasks}, efforts=efforts, started=self.started)

    def _differences(self, new: Manifest) -> list[tuple[str, Any, Any]]:
        found = []
        for name in dict.fromkeys((*self.settings, *new.settings)):
            found.append((name, self.settings.get(name), new.settings.get(name)))
        for name in ("id", "root"):
            found.append((f"model {name}", self.server_model.get(name), new.server_model.get(name)))
        for name in self.tasks.keys() & new.tasks.keys():
            old_task, new_task = self.tasks[name], new.tasks[name]
            found.append((f"version of {name}", old_task.version, new_task.version))
            found.append((f"data of {name}", old_task.data_revision, new_task.data_revision))
        return [(what, old, now) for what, old, now in found if old != now]

    def write(self, folder: Path) -> None:
        """Writes the file in one step, so that a kill leaves the old or the new one."""
        value = asdict(replace(self, started=self.started or time.strftime("%Y-%m-%dT%H:%M:%S%z")))
        write_whole(folder / NAME, json.dumps(value, indent=1))


def read_manifest(folder: Path) -> Manifest | None:
    """Returns a folder's manifest, None if it has none. Raises ``JournalError`` for an unreadable one."""
    path = folder / NAME
    try:
        value = json.loads(path.read_text("utf-8"))
        if value["format"] != FORMAT:
            raise JournalError(f"{path}: written by another version of Chorale ({value.get('chorale')})")
        tasks = {name: TaskInfo(**task) for name, task in value["tasks"].items()}
        return Manifest(**(value | {"tasks": tasks, "efforts": tuple(value["efforts"])}))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalError(f"{path}: not the settings of a run ({error})") from None


def _say(value: Any) -> str:
    return "none" if value in (None, "") else str(value)
