"""A stand-in for torch_npu, for tests: a device called "npu" whose memory is this machine's.

Its tensors are wrappers of CPU tensors, which every operation unwraps. As on the hardware, an operation
cannot mix tensors of host and device (except single numbers), and only ``copy_`` copies between them. It does
not model which operations, types and layouts torch_npu supports, nor streams.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree, backend_registration

MEMORY = 2**34  # memory of each of the ``COUNT`` devices in bytes
COUNT = 8
_DEVICE = torch.device("cpu")
_CROSSING = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class NpuTensor(torch.Tensor):
    """``inside``: the CPU tensor."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor, index: int) -> NpuTensor:
        made: NpuTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inside.shape, inside.stride(), inside.storage_offset(), dtype=inside.dtype,
            device=torch.device("npu", index),
        )  # fmt: skip
        made.inside = inside
        return made

    def tolist(self) -> list[Any]:
        return self.inside.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.inference_mode(
            False
        ):  # or a view of a tensor that was made outside of it would be neither
            return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs one operation on the tensors inside. Raises ``RuntimeError`` where host and device meet."""
    flat, shape = _pytree.tree_flatten((args, kwargs))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    known = {id(each.inside): each for each in tensors if isinstance(each, NpuTensor)}
    if func not in _CROSSING:
        strangers = [each for each in tensors if not isinstance(each, NpuTensor) and each.dim()]
        if known and strangers:
            raise RuntimeError(f"{func}: tensors are on npu and on cpu")
    wanted = kwargs.get("device")
    on_npu = wanted.type == "npu" if wanted is not None else bool(known)
    if func is torch.ops.aten.copy_.default:
        on_npu = isinstance(args[0], NpuTensor)
    inner = [each.inside if isinstance(each, NpuTensor) else _inner(each) for each in flat]
    args, kwargs = _pytree.tree_unflatten(inner, shape)
    found = func(*args, **kwargs)
    if not on_npu:
        return found
    # An in-place operation returns the wrapper it was given: its sizes have not changed.

    def outside(made: torch.Tensor) -> torch.Tensor:
        same = known.get(id(made))
        return NpuTensor(made, _State.current) if same is None else same

    return _pytree.tree_map_only(torch.Tensor, outside, found)


def _inner(argument: Any) -> Any:
    is_npu = isinstance(argument, torch.device) and argument.type == "npu"
    return _DEVICE if is_npu else argument


class _State:
    current = 0


class Event:
    def record(self) -> None:
        return None

    def synchronize(self) -> None:
        return None


class _Module(ModuleType):
    """The part of ``torch.npu`` that Chorale calls."""

    Event = Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        return None

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return _State.current

    def set_device(self, index: int) -> None:
        _State.current = index

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name="stand-in NPU", total_memory=MEMORY)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return MEMORY - 2**30, MEMORY

    def empty_cache(self) -> None:
        return None


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> torch.Tensor:  # fmt: skip
    with torch.inference_mode(False):
        return NpuTensor(torch.empty(size, dtype=dtype), _State.current)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    with torch.inference_mode(False):
        return NpuTensor(torch.empty_strided(size, stride, dtype=dtype), _State.current)


class _Group:
    """Replaces ProcessGroupHCCL by gloo between the CPU tensors."""

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        import torch.distributed as dist

        inner = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        inner._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        inner._timeout = options._timeout
        self._group = dist.ProcessGroupGloo(store, rank, size, inner)

    def allgather(self, outputs: Any, inputs: Any) -> Any:
        return self._group.allgather(
            [[each.inside for each in some] for some in outputs], [each.inside for each in inputs]
        )


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    """Implements the copy that torch calls when it makes a tensor from numbers."""
    inner = [each.inside if isinstance(each, NpuTensor) else each for each in (target, source)]
    inner[0].copy_(inner[1])
    return target


_C = SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=_Group))
backend_registration._setup_privateuseone_for_python_backend("npu", backend_module=_Module("torch.npu"))
_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
