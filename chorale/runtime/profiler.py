"""TorchProfiler: writes traces of a rank's steps into the folder that the operator chose."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from chorale.config.profiler import ProfilerConfig


class TorchProfiler:
    """Profiles the calling thread and the device between ``start`` and ``stop``."""

    def __init__(self, config: ProfilerConfig, rank: int, device: torch.device) -> None:
        self._config, self._rank, self._device = config, rank, device
        self._running: torch.profiler.profile | None = None

    def start(self) -> None:
        config, kinds = self._config, [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(
            activities=kinds,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
        )
        self._running.start()

    def stop(self) -> None:
        """Write the trace. Its name has the time, the process and the rank."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
            suffix = ".pt.trace.json" + (".gz" if self._config.torch_profiler_use_gzip else "")
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}-{os.getpid()}"
            folder = Path(self._config.torch_profiler_dir)
            running.export_chrome_trace(str(folder / f"{name}-rank{self._rank}{suffix}"))
