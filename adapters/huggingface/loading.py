"""Paged models: from a checkpoint, whose weights only the engine holds, or around a module that somebody holds."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged_backend.adapters.huggingface.model import PagedGeneration, paged_class
from paged_backend.adapters.huggingface.state import Paged, fingerprint
from paged_backend.checkpoints.checkpoint import Checkpoint
from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.engine.factory import start_engine
from paged_backend.engine.registry import get_engine
from paged_backend.errors import ModelLoadError, UnsupportedModelError
from paged_backend.folders import hub_cache
from paged_backend.kernels.tensor import as_array

logger = logging.getLogger("paged_backend")

_DTYPES = {None: "auto", "auto": "auto", torch.float32: "float32", torch.bfloat16: "bfloat16"}
_DTYPES.update(
    {str(dtype).removeprefix("torch."): name for dtype, name in _DTYPES.items() if dtype is not None}
)
_HUB = ("revision", "cache_dir", "token", "local_files_only", "force_download")
ENGINE_OPTIONS = frozenset(f.name for f in dataclasses.fields(EngineConfig)) - {
    "model",
    "dtype",
    "trust_remote_code",
}


def from_pretrained(name: str | Path, **options: Any) -> Any:
    """See ``PagedModelForCausalLM.from_pretrained``."""
    from paged_backend.checkpoints.loading import load_checkpoint
    from paged_backend.checkpoints.resolve import resolve_model
    from paged_backend.models.transformers.module import load_module, module_class

    engine_options = {key: options.pop(key) for key in list(options) if key in ENGINE_OPTIONS}
    dtype = _dtype(options)
    _check_options(options)
    attention = options.pop("attn_implementation", None)
    generation_config = options.pop("generation_config", None)
    target = _locate(str(name), options)
    if options:
        raise TypeError(
            f"from_pretrained has no use for {', '.join(sorted(options))}; engine options are {sorted(ENGINE_OPTIONS)}"
        )
    checkpoint = load_checkpoint(resolve_model(target))
    base = module_class(checkpoint)
    config = base.config_class.from_dict(dict(checkpoint.config))
    config._name_or_path = str(name)
    if attention is not None:
        config._attn_implementation = attention
    config.dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    engine = get_engine(target, dtype=dtype, **engine_options)
    try:
        with torch.device("meta"):
            model = base(config).eval()
        if generation_config is not None:
            model.generation_config = generation_config
        elif checkpoint.generation_config:
            model.generation_config = type(model.generation_config).from_dict(
                dict(checkpoint.generation_config)
            )

        def load(config: Any) -> Any:  # which must not hold the model: its engine ends with it
            module = load_module(checkpoint, dtype, config=config)
            module.config._name_or_path = str(name)
            return module

        model.__class__ = paged_class(base)
        model.__dict__["_paged"] = Paged(engine, base, load, lambda module: _engine_of(module, base, {}))
    except BaseException:
        engine.close()
        raise
    _close_with(model)
    return model


def accelerate(model: Any, *, weights: str = "pack", **options: Any) -> Any:
    """See ``paged_backend.adapters.huggingface.accelerate``."""
    if isinstance(model, PagedGeneration):
        raise ValueError("this model generates with the engine already")
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "generation_config"):
        raise TypeError(
            f"accelerate takes a transformers model that can generate, not {type(model).__name__}"
        )
    if weights not in ("pack", "share"):
        raise ValueError(f"weights must be 'pack' or 'share', got {weights!r}")
    if any(type(part).__module__.split(".")[0] == "peft" for part in model.modules()):
        # they can be switched on and off without a trace in the weights
        raise ValueError("the model has PEFT adapters in it: merge them first, with merge_and_unload()")
    places = {parameter.device.type for parameter in model.parameters()}
    if places != {"cpu"}:
        raise ValueError(
            f"the engine runs on the CPU, the model is on {sorted(places)}: move it with .to('cpu')"
        )
    unknown = set(options) - ENGINE_OPTIONS - {"dtype"}
    if unknown:
        raise TypeError(
            f"accelerate has no option {sorted(unknown)}; engine options are {sorted(ENGINE_OPTIONS)}"
        )
    base = type(model)
    engine = _engine_of(model, base, options, weights)
    model.__class__ = paged_class(base)
    model.__dict__["_paged"] = Paged(
        engine, base, None, lambda module: _engine_of(module, base, options, weights), fingerprint(model)
    )
    _close_with(model)
    return model


def _engine_of(module: Any, base: type, options: Mapping[str, Any], weights: str = "pack") -> Engine:
    """An engine of its own for a module in memory: natively with packed weights, or over the module's own."""
    from paged_backend.engine.factory import kernels_for
    from paged_backend.models.loading import build_model, module_model
    from paged_backend.models.transformers.module import share

    checkpoint = _in_memory(module, base)
    config = EngineConfig.from_options(**{"model": str(checkpoint.path), **options})
    kernels = kernels_for(config)
    loaded = None
    if weights == "pack":
        try:
            loaded = build_model(config, kernels, checkpoint, through_transformers=False)
        except ModelLoadError as error:
            logger.info("%s runs through its own module: %s", base.__name__, error)
    if loaded is None:
        if config.dtype != "auto" or config.quantization is not None:
            raise UnsupportedModelError(
                f"{base.__name__} runs on the module's own weights as they are: leave out dtype and quantization"
            )
        twin = share(module)
        twin.__class__ = base
        twin.__dict__.pop("_paged", None)
        loaded = module_model(config, kernels, checkpoint, twin)
    return start_engine(config, kernels, loaded, None)


def _in_memory(module: Any, base: type) -> Checkpoint:
    """A module's weights as a checkpoint; on the CPU nothing is copied."""

    config = json.loads(module.config.to_json_string(use_diff=False))
    config["architectures"] = [base.__name__]
    state = dict(module.state_dict())
    return Checkpoint(
        config=config,
        tensors={name: partial(as_array, tensor) for name, tensor in state.items()},
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        generation_config={},
        path=Path(f"<{base.__name__} in memory>"),
        tokenizer_source="",
    )


def _close_with(model: Any) -> None:
    """Give the engine up when the model object goes away, whoever else has got hold of ``model.engine``."""
    paged = model.__dict__["_paged"]
    weakref.finalize(model, lambda: paged.engine.close_soon())


def _dtype(options: dict[str, Any]) -> str:
    given = options.pop("dtype", None)
    legacy = options.pop("torch_dtype", None)
    wanted = given if given is not None else legacy
    if wanted not in _DTYPES:
        raise ValueError(
            f"dtype {wanted!r} is not supported: use 'auto', torch.float32 or torch.bfloat16, or quantization='int8'"
        )
    return _DTYPES[wanted]


def check_loading(model: Any, options: Mapping[str, Any]) -> None:
    """Refuse options of loading that ask for something else than ``model``, which is loaded, is. Raises ValueError."""
    rest = dict(options)
    for name in ("dtype", "torch_dtype"):
        wanted = rest.pop(name, "auto")
        if str(wanted).removeprefix("torch.") not in ("auto", str(model.dtype).removeprefix("torch.")):
            raise ValueError(f"{name}={wanted!r}: the model is loaded already, as {model.dtype}")
    _check_options(rest)
    if rest:
        raise ValueError(f"{', '.join(rest)}: given when a model is loaded, and this one is")


def _check_options(options: dict[str, Any]) -> None:
    """Take out options of transformers that say what is so anyway; refuse those that ask for something else."""
    place = options.pop("device_map", None)
    values = set(map(str, place.values())) if isinstance(place, Mapping) else {str(place)}
    if not values <= {"None", "auto", "cpu"}:
        raise ValueError(
            f"device_map={place!r}: the engine runs on the CPU; use 'cpu', 'auto' or leave it out"
        )
    if options.pop("trust_remote_code", None):
        raise ValueError("trust_remote_code=True is not supported: code from a checkpoint is never run")
    for name in ("quantization_config", "load_in_8bit", "load_in_4bit"):
        if options.pop(name, None):
            raise ValueError(f"{name} is not supported: use quantization='int8' or 'int4'")
    options.pop("low_cpu_mem_usage", None)
    if options.pop("use_safetensors", None) is False:
        raise ValueError("use_safetensors=False is not supported: pickled weights are never read")
    for name in ("config", "state_dict"):
        if options.pop(name, None) is not None:
            raise ValueError(
                f"{name}= is not supported here: load the model with transformers and accelerate() it"
            )


def _locate(name: str, options: dict[str, Any]) -> str:
    """What the engine is to load: the name itself, so that others share it, or the file or revision asked for."""
    hub = {key: options.pop(key) for key in _HUB if key in options}
    hub = {key: value for key, value in hub.items() if value not in (None, False)}
    subfolder, file = options.pop("subfolder", ""), options.pop("gguf_file", None)
    if not (hub or subfolder or file):
        return name
    folder = Path(os.path.expanduser(name))
    if not folder.exists():
        from huggingface_hub import snapshot_download

        from paged_backend.checkpoints.resolve import HUB_FILES

        files = [file] if file else [f"{subfolder}/{p}" if subfolder else p for p in HUB_FILES]
        folder = Path(snapshot_download(name, allow_patterns=files, **{"cache_dir": hub_cache(), **hub}))
    return str(folder / subfolder / file if file else folder / subfolder)
