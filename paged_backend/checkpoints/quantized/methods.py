"""The reader that a folder's ``quantization_config`` asks for, and a folder's tensors through it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paged_backend.checkpoints.quantized.bitsandbytes import bitsandbytes
from paged_backend.checkpoints.quantized.compressed_tensors import compressed_tensors
from paged_backend.checkpoints.quantized.float8 import fp8
from paged_backend.checkpoints.quantized.gptq import awq, gptq
from paged_backend.checkpoints.quantized.parts import Found, Parts, Stored
from paged_backend.errors import ModelLoadError, UnsupportedModelError

logger = logging.getLogger(__name__)

_METHODS: dict[str, Callable[[Mapping[str, Any], str], Callable[[Parts], Found | None]]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "bitsandbytes": bitsandbytes,
}
_NAME = re.compile(r"(?:(.+?)\.)?(weight\..+|[^.]+)")
# of activations and of the KV cache, which stay floating point numbers here
_ACTIVATION = re.compile(
    r"(input|output|[qkv]|kv)_(scale|zero_point|global_scale|scale_ub)|activation_scale(_ub)?|(k|v)_cache\.scale"
)


def read_quantized(
    path: Path, settings: Mapping[str, Any], stored: Mapping[str, Stored]
) -> tuple[dict[str, Found], dict[str, Stored]]:
    """Weights of quantised modules by plain names (``model.layers.0.mlp.up_proj.weight``), and the tensors that are
    none of their parts.

    Which modules are quantised is seen from their tensors; the rest is left as it is. Raises UnsupportedModelError
    for a method or setting that has no reader, ModelLoadError for tensors that do not make up a weight.
    """
    if not isinstance(settings, Mapping):
        raise ModelLoadError(f"{path}: quantization_config is no JSON object")
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        method = "bitsandbytes"  # which did not name itself once
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"{path}: quantization_config with quant_method {method!r} is not supported; supported are "
            f"{', '.join(_METHODS)}, or load the unquantised checkpoint with quantization='int8' or 'int4'"
        )
    find = _METHODS[method](settings, str(path))
    modules: dict[str, dict[str, Stored]] = {}
    for name, entry in stored.items():
        matched = _NAME.fullmatch(name)
        module, part = (matched[1] or "", matched[2]) if matched else ("", name)
        modules.setdefault(module, {})[part] = entry
    weights: dict[str, Found] = {}
    rest: dict[str, Stored] = {}
    of_activations = 0
    for module, tensors in modules.items():
        found = find(Parts(module, str(path), tensors))
        if found is not None:
            weights[f"{module}.weight"] = found
        for part, entry in tensors.items():
            if found is not None and part in found.used:
                continue
            if _ACTIVATION.fullmatch(part):
                of_activations += 1
                continue
            rest[f"{module}.{part}" if module else part] = entry
    if not weights:
        raise ModelLoadError(
            f"{path}: quantization_config says {method}, but no tensor is quantised that way"
        )
    if of_activations:
        logger.info(
            "%s: weights keep their values; activations and the KV cache stay floating point numbers, so %d scales for "
            "them are not used",
            path,
            of_activations,
        )
    return weights, rest
