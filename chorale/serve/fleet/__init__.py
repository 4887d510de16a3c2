"""Chorale on a Ray cluster, as an application of Ray Serve (docs/explanation/fleet.md).

``serve run chorale.serve.fleet:app model=demo``, or a ``serve.config`` YAML with ``import_path:
chorale.serve.fleet:app``. Ray is imported when the application is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["app"]


def app(args: Mapping[str, Any]) -> Application:
    """Builds the application. ``args`` are options of ``chorale serve``, as in a ``--config`` file.

    Raises ``ConfigError`` for an unknown option, or a value that cannot run.
    """
    from chorale.serve.fleet.application import application_of

    return application_of(args)
