"""Checks the configuration before anything is started, in well under a second and without torch.

The engine and the HTTP processes would find the same errors, but only after the port is announced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sqlite3
from pathlib import Path

from chorale.config.engine import DEMO, EngineConfig, ServerConfig
from chorale.config.model_names import full_name
from chorale.errors import ChoraleError, ConfigError
from chorale.machine.devices import check_visible, replica_environments, visible_ids
from chorale.machine.hardware import Hardware, available_memory, check_gpus
from chorale.machine.platforms import CUDA, NPU, find_platform
from chorale.model.config import ModelConfig
from chorale.model.config_writer import SHAPES, make_config
from chorale.model.demo.shape import demo_config
from chorale.model.hub import check_family, find_folder, has_weights
from chorale.runtime.sizing.memory import SMALL_PARAMETERS
from chorale.runtime.sizing.resolve import check_model, resolve
from chorale.serve.http.tls import check_tls
from chorale.store.database.schema import check_format
from chorale.store.database.sqlite import MEMORY, NO_SPACE
from chorale.store.store import default_path, is_postgres
from chorale.tracing.otel import check_endpoint, is_disabled


def check_name(config: EngineConfig) -> None:
    """Raises ``ConfigError`` for a missing folder or an unsupported model family."""
    if config.model != DEMO and find_folder(config.model) is None:
        check_family(full_name(config.model), revision=config.revision, download_dir=config.download_dir)


def check_start(engine: EngineConfig, server: ServerConfig) -> None:
    """Raises ``ConfigError`` for the first error found."""
    check_tls(server)
    if server.otlp_traces_endpoint is not None and not is_disabled(os.environ):
        check_endpoint(server.otlp_traces_endpoint, os.environ)
    count = server.data_parallel_size
    # This comes before check_device, so that the error for too few GPUs counts all ranks of all engines.
    if (count > 1 or engine.device_ids) and replica_environments(engine, count) is None:
        engine = dataclasses.replace(engine, host_share=count)
    check_device(engine)
    model = find_model(engine)
    if model is not None:
        _check_sizes(engine, model)
    check_store(server.response_store)
    if server.batch_storage is not None:
        from chorale.jobs.service import check_batch_storage  # imports many modules

        check_batch_storage(server)


def check_device(config: EngineConfig) -> None:
    """Raises ``ConfigError`` if a device that was requested by name is missing."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # Triton then runs kernels on the CPU
    platform = find_platform(config.device)
    if config.ops == "triton" and not interpreted:
        reason = f"the device is {config.device!r}"
        if config.device != "cpu" and platform is not NPU:
            reason = (platform or CUDA).why_absent() or ""
        if reason:
            raise ConfigError(f"--ops triton needs a GPU that PyTorch can use: {reason}")
    if platform is None:
        return
    if config.device != "auto" and (absent := platform.why_absent()) is not None:
        raise ConfigError(f"--device {config.device}: {absent}; use --device cpu, or auto")
    if config.tensor_parallel_size > 1:
        variable = platform.variable(os.environ)
        check_visible(config.tensor_parallel_size, variable=variable)
        ids = visible_ids(os.environ, variable)
        gpus = platform.count() if platform is CUDA or ids is None else len(ids)
        check_gpus(config.tensor_parallel_size, gpus, variable)


def find_model(config: EngineConfig) -> ModelConfig | None:
    """Returns the configuration of the model, or None for a hub model whose name is unknown."""
    if config.model == DEMO:
        return demo_config()
    folder = find_folder(config.model)
    if folder is None:
        name = config.model.lower().split("/")[-1].removeprefix("gpt-oss-")
        return make_config(**SHAPES[name]) if name in SHAPES else None
    found = ModelConfig.load(folder)
    if not has_weights(folder):
        raise ConfigError(f"model {config.model!r}: {folder} has no safetensors files")
    return found


def _check_sizes(config: EngineConfig, model: ModelConfig) -> None:
    """Checks sizes as the engine does. Skips memory on a GPU, which only the engine opens."""
    if find_platform(config.device) is None:
        if config.device == "auto" and model.num_parameters > SMALL_PARAMETERS:
            check_gpus(config.tensor_parallel_size, 0)  # several ranks of a large model need GPUs
        free = available_memory() // (config.host_share * config.tensor_parallel_size)  # per rank
        resolve(config, model, Hardware("cpu", "this machine", free, free))
    else:
        check_model(config, model)


def check_store(location: str | None) -> None:
    """Checks that the response store can be opened. An unusable default location is not an error."""
    if location is None:
        _check_format(default_path())
        return
    if location == MEMORY:
        return
    try:
        if is_postgres(location):
            from chorale.store.database.postgres import connect

            connect(location, False).close()
        else:
            _check_file(Path(location))
    except OSError as error:
        if error.errno not in NO_SPACE:  # on a full or read-only disk the server starts without storing
            raise ConfigError(
                f"--response-store {location}: cannot open this file: {error.strerror}"
            ) from None
    except ConfigError:
        raise
    except ChoraleError as error:
        raise ConfigError(f"--response-store: {error.message}") from None


def _check_file(path: Path) -> None:
    """Raises ``OSError`` if the file, or its folder (in which SQLite creates more files), is not writable."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"the folder {path.parent} is not writable")
    _check_format(path)


def _check_format(path: Path) -> None:
    """Raises ``ConfigError`` for an unsupported format. Unreadable files are reported when opened."""
    if not path.is_file():
        return
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        ) as connection:
            row = connection.execute("SELECT version FROM schema_version").fetchone()
    except sqlite3.Error:
        return
    if row is not None:
        check_format(row[0], f"the response store {path}")
