"""Properties of GPUs and NPUs by name, for ``chorale fit --gpu`` and ``chorale warm --gpu``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from chorale.config.suggestions import nearest
from chorale.errors import ConfigError
from chorale.machine.hardware import DRIVER_BYTES, Hardware, Kind
from chorale.machine.platforms import NPU, ROCM

MIB = 2**20
GIB_OF_MIB = 1024


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU. ``memory``: MiB as the driver reports. ``bandwidth``: TB/s from the data sheet, None if unknown.

    ``architecture`` and ``multiprocessors`` (of the card named, not of its aliases) decide on its kernels.
    ``state``: a remark on Chorale's support, empty if fully supported.
    """

    name: str
    memory: int
    bandwidth: float | None
    architecture: str
    multiprocessors: int
    state: str = ""
    aliases: tuple[str, ...] = ()


_AMD, _ASCEND = ROCM.state, NPU.state
_UNIFIED = "GPU memory is shared with the host: leave room for the system"
# fmt: off
MODELS = (
    GpuModel("A100-40", 40960, 1.555, "sm_80", 108,
             aliases=("a100-40gb", "a100-sxm4-40gb", "a100-pcie-40gb")),
    GpuModel("A100", 81920, 2.039, "sm_80", 108, aliases=("a100-80", "a100-80gb", "a100-sxm4-80gb")),
    GpuModel("H100", 81559, 3.35, "sm_90", 132, aliases=("h100-80", "h100-80gb", "h100-sxm", "h100-hbm3")),
    GpuModel("H100-PCIe", 81559, 2.0, "sm_90", 114),
    GpuModel("H100-NVL", 95830, 3.9, "sm_90", 132, aliases=("h100-94", "h100-94gb")),
    GpuModel("GH200", 97871, 4.0, "sm_90", 132, aliases=("gh200-96", "gh200-96gb")),
    GpuModel("H20", 97871, 4.0, "sm_90", 78),
    GpuModel("H200", 143771, 4.8, "sm_90", 132, aliases=("h200-141", "h200-141gb", "h200-sxm", "h200-nvl")),
    GpuModel("B200", 183359, 8.0, "sm_100", 148,
             aliases=("b200-180", "b200-192", "b200-180gb", "b200-192gb")),
    GpuModel("GB200", 189471, 8.0, "sm_100", 148, aliases=("gb200-186", "gb200-192")),
    GpuModel("B300", 275040, 8.0, "sm_103", 148, aliases=("gb300", "b300-288")),
    GpuModel("L4", 23034, 0.3, "sm_89", 58),
    GpuModel("L40S", 46068, 0.864, "sm_89", 142, aliases=("l40",)),
    GpuModel("A10", 23028, 0.6, "sm_86", 72, aliases=("a10g",)),
    GpuModel("A6000", 49140, 0.768, "sm_86", 84, aliases=("rtx-a6000",)),
    GpuModel("RTX-3090", 24576, 0.936, "sm_86", 82, aliases=("3090", "rtx-3090-ti", "3090-ti")),
    GpuModel("RTX-A4000", 16376, 0.448, "sm_86", 48, aliases=("a4000",)),
    GpuModel("RTX-4060-Ti-16GB", 16380, 0.288, "sm_89", 34, aliases=("4060-ti-16gb",)),
    GpuModel("RTX-4070-Ti-Super", 16376, 0.672, "sm_89", 66, aliases=("4070-ti-super",)),
    GpuModel("RTX-4080", 16376, 0.717, "sm_89", 76, aliases=("4080", "rtx-4080-super", "4080-super")),
    GpuModel("RTX-4090", 24564, 1.008, "sm_89", 128, aliases=("4090",)),
    GpuModel("RTX-5060-Ti-16GB", 16311, 0.448, "sm_120", 36,
             aliases=("5060-ti-16gb", "rtx-5060-ti", "5060-ti")),
    GpuModel("RTX-5070-Ti", 16303, 0.896, "sm_120", 70, aliases=("5070-ti",)),
    GpuModel("RTX-5080", 16303, 0.96, "sm_120", 84, aliases=("5080",)),
    GpuModel("RTX-5090", 32607, 1.792, "sm_120", 170, aliases=("5090",)),
    GpuModel("RTX-6000-Ada", 49140, 0.96, "sm_89", 142, aliases=("6000-ada", "rtx6000ada")),
    GpuModel("RTX-PRO-6000", 97887, 1.792, "sm_120", 188,
             aliases=("pro-6000", "rtx-pro-6000-blackwell", "pro-6000-blackwell")),
    GpuModel("DGX-Spark", 122570, 0.273, "sm_121", 48, _UNIFIED, ("gb10", "spark")),
    GpuModel("MI300X", 192 * GIB_OF_MIB, 5.3, "gfx942", 304, _AMD, ("mi300",)),
    GpuModel("MI325X", 256 * GIB_OF_MIB, 6.0, "gfx942", 304, _AMD, ("mi325",)),
    GpuModel("MI350X", 288 * GIB_OF_MIB, 8.0, "gfx950", 256, _AMD, ("mi350",)),
    GpuModel("MI355X", 288 * GIB_OF_MIB, 8.0, "gfx950", 256, _AMD, ("mi355",)),
    # Each device that torch_npu shows; an A3 card has two.
    GpuModel("Ascend-910B", 65536, None, "ascend910b", 0, _ASCEND, ("910b", "atlas-a2", "ascend-a2")),
    GpuModel("Ascend-910C", 65536, None, "ascend910c", 0, _ASCEND, ("910c", "atlas-a3", "ascend-a3")),
    # 64 compute units. ROCm counts RDNA's in pairs as multiprocessors: 32 is a guess, never read from a card.
    GpuModel("R9700", 32 * GIB_OF_MIB, 0.64, "gfx1201", 32, _AMD, ("ai-pro-r9700", "radeon-ai-pro-r9700")),
)
# fmt: on


def _key(name: str) -> str:
    """Normalises a name, ignoring case, blanks, dashes and vendor: "NVIDIA H100 80GB" is "h100-80gb"."""
    return re.sub(r"^(nvidia|geforce|amd|instinct|radeon)+", "", re.sub(r"[\s_-]+", "", name.lower()))


MOST = 64  # GPUs of a machine; also the limit of --data-parallel-size
_SEVERAL = re.compile(r"\s*(-?\d+)\s*x(.*)", re.IGNORECASE)  # 4xh100
_TOO_OLD = ("t4", "v100", "p100", "p40", "titanrtx", "rtx2080ti", "rtx8000", "quadrortx8000")
_BY_KEY = {_key(name): model for model in MODELS for name in (model.name, *model.aliases)}


def find_gpu(name: str) -> GpuModel:
    """Finds a GPU by name. Raises ``ConfigError`` with the nearest name, or with all names."""
    found = _BY_KEY.get(_key(name))
    if found is not None:
        return found
    if re.fullmatch(r"\d{1,2}x[a-z]+\d+.*|[a-z]+\d+.*x\d{1,2}", _key(name)):
        raise ConfigError(
            f"--gpu {name}: name the GPU once; --tensor-parallel-size sets how many share a model, "
            "--data-parallel-size the number of engines (chorale fit compares the ways for --gpu 4xh100)"
        )
    if _key(name) in _TOO_OLD:
        raise ConfigError(f"--gpu {name}: too old; the kernels need an NVIDIA GPU of Ampere (sm_80) or newer")
    near = nearest(name.lower(), [each.name.lower() for each in MODELS])
    known = ", ".join(each.name for each in MODELS)
    raise ConfigError(f"--gpu {name}: unknown GPU{near or f'; known GPUs: {known}'}")


def find_gpus(name: str) -> tuple[int | None, GpuModel]:
    """Finds GPUs by a form such as ``4xh100``. Returns the number (None if there is none) and the GPU.

    Raises ``ConfigError`` for a number that no machine has, and for an unknown GPU.
    """
    match = _SEVERAL.fullmatch(name)
    if match is None:
        return None, find_gpu(name)
    number, model = match[1], match[2].strip()
    if not model:
        raise ConfigError(f"--gpu {name}: the name of the GPU is missing, for example --gpu {number}xh100")
    if not 1 <= int(number[:9]) <= MOST:
        raise ConfigError(f"--gpu {name}: the number of GPUs must be 1 to {MOST}")
    try:
        return int(number), find_gpu(model)
    except ConfigError as error:
        raise ConfigError(error.message.replace(f"--gpu {model}:", f"--gpu {name}:")) from None


def kind_of(model: GpuModel) -> Kind:
    """Returns the kind of device that the engine will find."""
    return (
        "cuda"
        if model.architecture.startswith("sm_")
        else "rocm"
        if model.architecture.startswith("gfx")
        else "npu"
    )


def hardware_of(model: GpuModel) -> Hardware:
    """Returns the hardware description of an idle GPU."""
    total = model.memory * MIB
    kind = kind_of(model)
    capability = int(model.architecture.removeprefix("sm_")) if kind == "cuda" else 0
    return Hardware(kind, model.name, total, total - DRIVER_BYTES, capability=capability)


def is_gpu(name: str) -> bool:
    """Returns whether every part of a list such as ``h100,4xh200`` names a known GPU."""
    parts = ((_SEVERAL.fullmatch(part), part) for part in name.split(","))
    return all(_key(match[2] if match else part) in _BY_KEY for match, part in parts)
