"""Builds the CPU kernels into the wheel, or a source tree that is installed in place."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CpuKernels(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Without a compiler the wheel is pure Python, and the torch ops serve on CPUs."""
        build = _load(Path(self.root) / "chorale/kernels/cpu/build.py")
        try:
            sets = build.build()
        except build.BuildError as error:
            self.app.display_warning(f"chorale's CPU kernels are not built: {error}")
            return
        self.app.display_info(f"chorale's CPU kernels: {', '.join(sets)}")
        build_data["artifacts"].append("/chorale/kernels/cpu/" + build.LIBRARY.name)
        build_data["pure_python"] = False
        # The library calls neither Python nor torch: one wheel for all versions of both.
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _load(path: Path) -> ModuleType:
    """The package itself cannot be imported while it is built: its dependencies are not there."""
    spec = importlib.util.spec_from_file_location("build_cpu_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
