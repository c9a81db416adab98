"""Checkpoints from folders of safetensors, as Hugging Face saves them."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from paged_backend.checkpoints.checkpoint import Checkpoint, TensorSource
from paged_backend.errors import ModelLoadError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_folder(path: Path) -> Checkpoint:
    """Config and lazily read tensors of a folder. Raises ModelLoadError naming the file."""
    config, generation_config = read_configs(path)
    sources: dict[str, TensorSource] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    integers: dict[str, tuple[str, TensorSource]] = {}
    for shard, names in _shards(path).items():
        _map_shard(path / shard, names, sources, shapes, integers)
    return Checkpoint(
        config=config,
        tensors=sources,
        shapes=shapes,
        generation_config=generation_config,
        path=path,
        tokenizer_source=str(path),
        integers=integers,
    )


def read_configs(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of ``config.json``, and of ``generation_config.json`` if there is one. Raises ModelLoadError."""
    config = _read_json(path / "config.json", f"{path} has no config.json, so it is not a model folder")
    generation = path / "generation_config.json"
    return config, _read_json(generation, "") if generation.exists() else {}


def _shards(path: Path) -> dict[str, list[str]]:
    """Safetensors files of a folder, with the tensors the index promises in each."""
    if (path / WEIGHTS).exists():
        return {WEIGHTS: []}
    if (path / INDEX).exists():
        weight_map = _read_json(path / INDEX, "").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{path / INDEX} has no weight_map")
        shards: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            # an index is downloaded data: it may not point outside of its folder
            if not isinstance(shard, str) or os.path.basename(shard) != shard:
                raise ModelLoadError(
                    f"{path / INDEX} places tensor {name!r} in {shard!r}, which is no plain file name"
                )
            shards.setdefault(shard, []).append(name)
        for shard in shards:
            if not (path / shard).exists():
                raise ModelLoadError(
                    f"{path / INDEX} names {shard!r}, but that file is missing: download it again"
                )
        return shards
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{path} has only pickled weights ({pickles[0]}), which can run code when read and are "
            "refused: convert them with transformers, "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ModelLoadError(f"{path} has no weights: neither {WEIGHTS} nor {INDEX}")


def _map_shard(
    file: Path,
    promised: list[str],
    sources: dict[str, TensorSource],
    shapes: dict[str, tuple[int, ...]],
    integers: dict[str, tuple[str, TensorSource]],
) -> None:
    """Add the tensors of one memory-mapped file, those that are no floats to ``integers``; only its header is read."""
    from safetensors import SafetensorError, safe_open

    try:
        mapped: Any = safe_open(file, framework="pt")
        names = list(mapped.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(f"{file} is damaged or cut short ({error}): download it again") from error
    for name in promised:
        if name not in names:
            raise ModelLoadError(
                f"{file.parent / INDEX} places tensor {name!r} in {file.name!r}, which does not have it"
            )
    for name in names:
        view = mapped.get_slice(name)
        if view.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            integers[name] = view.get_dtype(), partial(mapped.get_tensor, name)
            continue
        sources[name] = partial(mapped.get_tensor, name)
        shapes[name] = tuple(view.get_shape())


def _read_json(file: Path, missing: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(missing) from error
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must hold a JSON object")
    return content
