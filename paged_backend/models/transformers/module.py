"""Modules of transformers: made from a checkpoint, or shared with whoever holds one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from paged_backend.checkpoints.checkpoint import Checkpoint
from paged_backend.errors import ModelLoadError, UnsupportedModelError
from paged_backend.kernels.tensor import as_tensor
from paged_backend.kernels.weights import to_dense
from paged_backend.models.tensors import check_missing, tell_unused

_DTYPES = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_module(checkpoint: Checkpoint, dtype: str = "auto", config: Any = None) -> Any:
    """The transformers module of a checkpoint; float32 weights stay views of its memory-mapped file.

    dtype: ``auto`` (float32), ``float32``, ``bfloat16`` or ``float16``, which is also the precision of its arithmetic.
    config: a transformers config to use instead of the checkpoint's own. Raises UnsupportedModelError if
    transformers has no such causal language model, ModelLoadError if the tensors do not fit it.
    """
    if dtype not in _DTYPES:
        raise UnsupportedModelError(
            f"{dtype} weights are for natively supported architectures; use {list(_DTYPES)}"
        )
    model_class = module_class(checkpoint)
    if config is None:
        config = model_class.config_class.from_dict(dict(checkpoint.config))
    state = {name: as_tensor(to_dense(read())) for name, read in checkpoint.tensors.items()}
    if checkpoint.integers:
        with torch.device("meta"):
            own = model_class(config).state_dict()
        for name, (_, read) in checkpoint.integers.items():
            if name in own and not own[name].is_floating_point():
                state[name] = as_tensor(read())
    with _quiet():
        module, info = model_class.from_pretrained(
            None, config=config, state_dict=state, dtype=_DTYPES[dtype], output_loading_info=True
        )
    integers = {name: kind for name, (kind, _) in checkpoint.integers.items()}
    check_missing(checkpoint.path, model_class.__name__, sorted(map(str, info["missing_keys"])), integers)
    for name in sorted(map(str, info["mismatched_keys"])):
        raise ModelLoadError(
            f"{checkpoint.path} has another shape than its config asks for in tensor {name!r} ({model_class.__name__})"
        )
    left = sorted(map(str, info["unexpected_keys"]))
    parts = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    for name in left:
        if name.rpartition(".")[0] in parts:  # a bias, say, of a layer that has none by its config
            raise ModelLoadError(
                f"{checkpoint.path} has no use for tensor {name!r} ({model_class.__name__}): its config.json does not "
                "describe these weights"
            )
    tell_unused(checkpoint.path, left)
    return module.eval()


def module_class(checkpoint: Checkpoint) -> Any:
    """transformers' class for a checkpoint. Raises UnsupportedModelError."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    config = checkpoint.config
    if config.get("quantization_config"):
        raise UnsupportedModelError(f"{checkpoint.path} is quantized in a way that is not supported here")
    named = (config.get("architectures") or [None])[0] or NAMES.get(config.get("model_type") or "")
    known = {name for entry in NAMES.values() for name in ([entry] if isinstance(entry, str) else entry)}
    if named not in known:
        raise UnsupportedModelError(
            f"architecture {named!r} is neither supported natively nor a causal language model of "
            f"transformers {transformers.__version__}"
        )
    return getattr(transformers, named)


def share(module: nn.Module) -> Any:
    """A second module object over the very same parameters and buffers, with a config of its own.

    The engine's settings and its thread then cannot disturb whoever uses ``module``.
    """
    configs: dict[int, Any] = {}

    def clone(part: nn.Module) -> nn.Module:
        if hasattr(part, "_hf_hook"):
            raise UnsupportedModelError(
                "the module's weights are dispatched by accelerate hooks (device_map)"
            )
        twin = part.__class__.__new__(part.__class__)
        twin.__dict__.update(part.__dict__)
        twin._parameters, twin._buffers = dict(part._parameters), dict(part._buffers)
        if "config" in part.__dict__:
            config = part.__dict__["config"]
            twin.__dict__["config"] = configs.setdefault(id(config), copy.deepcopy(config))
        twin._modules = {
            name: None if child is None else clone(child) for name, child in part._modules.items()
        }
        return twin

    return clone(module)


class _quiet:
    """transformers draws a progress bar for every load; this hides it."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()

    def __exit__(self, *exc: object) -> None:
        from transformers.utils import logging

        if self._shown:
            logging.enable_progress_bar()
