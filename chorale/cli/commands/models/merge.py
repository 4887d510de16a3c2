"""``chorale merge MODEL ADAPTER OUT``: a checkpoint with a LoRA adapter added to its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from chorale.config.options.help import wants_help
from chorale.errors import ConfigError

if TYPE_CHECKING:
    from chorale.model.config import ModelConfig
    from chorale.model.lora.merge import MergedWeights

USAGE = """usage: chorale merge MODEL ADAPTER OUT [--experts bf16|mxfp4]

Writes the model with the adapter added to the new folder OUT. Experts stay
MXFP4 if the adapter does not change them; otherwise they become bfloat16, or
MXFP4 again with --experts mxfp4, which rounds them."""
_KEPT = (".json", ".jinja", ".txt", ".md", ".model")
_WRITTEN = ("config.json", "model.safetensors.index.json", "adapter_config.json")


def run(arguments: list[str]) -> int:
    if not arguments or wants_help(arguments):
        print(USAGE)
        return 0
    model, adapter, out, packs = _read(arguments)
    if out.exists():
        raise ConfigError(f"{out}: exists already; merge writes a new folder")
    part = out.with_name(f"{out.name}.part")
    try:
        merged = _write(model, adapter, part, packs=packs)
        part.rename(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    experts = "MXFP4" if merged.layout == "published" else "bfloat16"
    print(f"wrote {out}: experts {experts}, the rest bfloat16")
    if merged.errors:
        worst = max(merged.errors, key=lambda name: merged.errors[name])
        mean = sum(merged.errors.values()) / len(merged.errors)
        print(f"rounding to MXFP4: relative error {mean:.2%}, at most {merged.errors[worst]:.2%} ({worst})")
    return 0


def _read(arguments: list[str]) -> tuple[str, Path, Path, bool]:
    """Returns model, adapter, output, and whether adapted experts become MXFP4. Raises ``ConfigError``."""
    rest, experts = list(arguments), "bf16"
    for index, word in enumerate(arguments):
        if word == "--experts" or word.startswith("--experts="):
            given = word.partition("=")[2] if "=" in word else "".join(arguments[index + 1 : index + 2])
            rest, experts = [*arguments[:index], *arguments[index + (1 if "=" in word else 2) :]], given
            break
    if experts not in ("bf16", "mxfp4"):
        raise ConfigError(f"--experts {experts}: must be bf16 or mxfp4")
    if len(rest) != 3 or any(word.startswith("-") for word in rest):
        raise ConfigError(f"expected: MODEL ADAPTER OUT; {USAGE.splitlines()[0]}")
    return rest[0], Path(rest[1]), Path(rest[2]), experts == "mxfp4"


def _write(model: str, adapter: Path, folder: Path, *, packs: bool) -> MergedWeights:
    from chorale.measure.bench.checkpoint_writer import write_shards
    from chorale.model.checkpoint import Checkpoint
    from chorale.model.config import ModelConfig
    from chorale.model.hub import resolve_model
    from chorale.model.layouts import kv_scale_specs, tensor_specs
    from chorale.model.lora.merge import MergedWeights
    from chorale.model.lora.read import read_adapter

    source = resolve_model(model)
    config = ModelConfig.load(source)
    checkpoint = Checkpoint(source, config)
    merged = MergedWeights(checkpoint, config, read_adapter(adapter, config), packs=packs)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix in _KEPT and path.name not in _WRITTEN:
            shutil.copyfile(path, folder / path.name)
    text = json.dumps(_config(source, config, merged), indent=1)
    (folder / "config.json").write_text(text, "utf-8")
    specs = list(tensor_specs(config, merged.layout))
    specs += [spec for spec in kv_scale_specs(config) if checkpoint.has(spec.layer, spec.role)]
    write_shards(folder, specs, merged, config.num_hidden_layers + 1)
    return merged


def _config(source: Path, config: ModelConfig, merged: MergedWeights) -> dict[str, object]:
    """Returns the content of config.json: the source's, if it has the published form."""
    from chorale.model.config_writer import config_json

    path = source / "config.json"
    raw: dict[str, object] = json.loads(path.read_bytes()) if path.exists() else {}
    if "architectures" not in raw:
        return config_json(config, merged.layout)
    if merged.layout == "dense":
        raw.pop("quantization_config", None)
    return raw
