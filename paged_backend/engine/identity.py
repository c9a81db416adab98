"""What makes two configs ask for one engine: not how a model is spelt, but what its weights would be in memory."""

from __future__ import annotations

import math
from collections.abc import Hashable, MutableMapping
from pathlib import Path

from paged_backend.config import EngineConfig
from paged_backend.engine.factory import kernels_for
from paged_backend.errors import UnsupportedModelError
from paged_backend.kernels.base import Kernels

WEIGHT_OPTIONS = frozenset(("model", "device", "dtype", "kernels", "quantization"))
"""Options that need another copy of the weights; engines that differ in these are different engines."""


def weights_key(config: EngineConfig, formats: MutableMapping[Hashable, str]) -> Hashable:
    """Equal for configs whose engines would hold the same weights in the same way.

    It is made of the files as they are now, the device, the kernels, what activations are kept in and the format of the
    weights. formats: a memory of this function. Raises what loading the model would.
    """
    from paged_backend.checkpoints.resolve import resolve_model

    path, kernels = resolve_model(config.model), kernels_for(config)
    files = _signature(path)
    stored = config.quantization or config.dtype
    if stored == "auto":
        known = (path, files, kernels.name, config.activation_dtype)
        if known not in formats:
            # only the C kernels look at the values; the others store what they compute in
            formats[known] = _auto_format(path, kernels) if kernels.name == "c" else config.activation_dtype
        stored = formats[known]
    return path, files, config.device, kernels.name, config.activation_dtype, stored


def _signature(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file of a model, which is another model when it was written anew."""
    names = ("*.safetensors", "*.json", "*.jinja")
    files = [path] if path.is_file() else sorted(file for name in names for file in path.glob(name))
    return tuple((file.name, (found := file.stat()).st_size, found.st_mtime_ns) for file in files)


def _auto_format(path: Path, kernels: Kernels) -> str:
    """What ``dtype="auto"`` means for a model: what the kernels make of its smallest linear."""
    from paged_backend.checkpoints.loading import load_checkpoint
    from paged_backend.models.architectures import spec_from_config

    checkpoint = load_checkpoint(path)
    try:
        spec_from_config(checkpoint.config)
    except UnsupportedModelError:
        return "float32"  # as the modules of transformers are loaded
    linears = {name: shape for name, shape in checkpoint.shapes.items() if name.endswith("_proj.weight")}
    if not linears:
        return "auto"
    smallest = min(linears, key=lambda name: (math.prod(linears[name]), name))
    return str(getattr(kernels.pack_linear([checkpoint.tensors[smallest]()]), "dtype", "auto"))
