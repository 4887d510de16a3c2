"""Checks the installed version of Ray. Ray itself is only imported by ``import_serve``."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

from chorale.errors import ConfigError, install_hint

LEAST, TRIED = (2, 60), (2, 60)  # oldest supported and newest tested version
INSTALL = install_hint("ray")


def installed() -> str | None:
    """Returns the installed version of Ray, or None."""
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None


def check(version: str | None) -> str | None:
    """Returns a warning about the version, or None. Raises ``ConfigError`` if it is not supported."""
    wanted = ".".join(map(str, LEAST))
    if version is None:
        raise ConfigError(f"Ray is not installed: {INSTALL} (on each machine of the cluster)")
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if found < LEAST:
        raise ConfigError(
            f"Ray {version} is too old: {wanted} or newer is needed, because older versions do not send "
            f"metadata of replicas to request routers ({INSTALL})"
        )
    if found > TRIED:
        tried = ".".join(map(str, TRIED))
        return f"Ray {version} has not been tried: the request router uses internal APIs of Ray {tried}"
    return None


def import_serve() -> ModuleType:
    """Returns ``ray.serve``. Raises ``ConfigError`` if it is not installed or too old."""
    check(installed())
    try:
        return importlib.import_module("ray.serve")
    except ImportError as error:
        raise ConfigError(f"Ray Serve cannot be imported ({error}): {INSTALL}") from error
