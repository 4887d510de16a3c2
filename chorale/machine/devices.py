"""Which devices each replica gets. Torch-free: the supervisor decides before any engine starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from chorale.config.engine import VALID_SIZES, EngineConfig
from chorale.errors import ConfigError
from chorale.machine.hardware import check_no_instances
from chorale.machine.platforms import CUDA, find_platform

VISIBLE = CUDA.variables[0]


def visible_ids(environment: Mapping[str, str], variable: str = VISIBLE) -> list[str] | None:
    """Returns the ids in ``variable`` as the operator wrote them, or None if it is not set.

    They may be numbers, UUIDs or MIG instances. The list ends at the first "-1", as for the driver.
    """
    given = environment.get(variable)
    if given is None:
        return None
    ids = [part.strip() for part in given.split(",")]
    end = next((position for position, part in enumerate(ids) if part in ("", "-1")), len(ids))
    return ids[:end]


def check_visible(
    num_ranks: int,
    num_replicas: int = 1,
    environment: Mapping[str, str] = os.environ,
    variable: str = VISIBLE,
) -> None:
    """Raises ``ConfigError`` if ``variable`` lists a GPU twice, or MIG instances for several ranks."""
    ids = visible_ids(environment, variable) or []
    twice = next((each for position, each in enumerate(ids) if each in ids[:position]), None)
    if twice is not None and num_ranks * num_replicas > 1:
        raise ConfigError(f"{variable}={environment[variable]} names {twice} twice; name each GPU once")
    check_no_instances(num_ranks, ids)


def share(ids: Sequence[str], num_replicas: int, num_ranks: int, variable: str = VISIBLE) -> list[list[str]]:
    """Returns each replica's ids: the first ``num_ranks``, the next ones, and so on.

    Raises ``ConfigError`` if there are too few.
    """
    needed = num_replicas * num_ranks
    if len(ids) < needed:
        each = "" if num_ranks == 1 else f" of {num_ranks} GPUs (--tensor-parallel-size)"
        seen = f" ({', '.join(ids)})" if ids else ""
        remedy = f"use {_fewer(len(ids), num_ranks)}"
        raise ConfigError(
            f"--data-parallel-size {num_replicas}: {num_replicas} engines{each} need {needed} GPUs, and "
            f"{len(ids)} are visible{seen}: {remedy}, or list more in {variable} "
            "(a MIG instance counts as one)"
        )
    return [list(ids[start : start + num_ranks]) for start in range(0, needed, num_ranks)]


def _fewer(gpus: int, num_ranks: int) -> str:
    """Returns options for which ``gpus`` GPUs are enough, or the CPU."""
    if gpus == 0:
        return "--device cpu"
    if gpus >= num_ranks:
        return f"--data-parallel-size {gpus // num_ranks}"
    most = max(size for size in VALID_SIZES if size <= gpus)
    return (
        f"--tensor-parallel-size {most} --data-parallel-size {gpus // most} "
        "(on the command line, which overrides a recipe)"
    )


def _chosen(device_ids: Sequence[int | str], visible: Sequence[str]) -> list[str]:
    """Returns the ids in ``device_ids``, of which numbers count the ``visible`` ones, as in vLLM."""
    numbers = [int(each) for each in device_ids if str(each).isdigit()]
    if numbers and max(numbers) >= len(visible):
        raise ConfigError(f"--device-ids {max(numbers)}: {len(visible)} GPUs are visible, from 0 on")
    return [visible[number] for number in numbers] or [str(each) for each in device_ids]


def replica_environments(
    config: EngineConfig, num_replicas: int, environment: Mapping[str, str] = os.environ
) -> list[dict[str, str]] | None:
    """Returns the variables of each replica, or None if they run on the CPU and share it.

    Raises ``ConfigError`` if there are fewer GPUs than the replicas need.
    """
    platform = find_platform(config.device)
    if platform is None or platform.why_absent() is not None:
        if config.device_ids:
            raise ConfigError("--device-ids: the engine finds no GPU, or runs on the CPU; leave it out")
        return None
    variable = platform.variable(environment)
    check_visible(config.tensor_parallel_size, num_replicas, environment, variable)
    ids = visible_ids(environment, variable)
    if ids is None:
        ids = [str(index) for index in range(platform.count())]
    source = variable
    if config.device_ids:
        ids, source = _chosen(config.device_ids, ids), "--device-ids"
    shares = share(ids, num_replicas, config.tensor_parallel_size, source)
    return [{variable: ",".join(part)} for part in shares]
