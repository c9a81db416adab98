"""From a checkpoint to a decoder that runs: check, pack."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paged_backend.checkpoints.checkpoint import Checkpoint
from paged_backend.checkpoints.checks import check_layers
from paged_backend.checkpoints.loading import load_checkpoint
from paged_backend.checkpoints.resolve import resolve_model
from paged_backend.config import EngineConfig
from paged_backend.errors import ModelLoadError, UnsupportedModelError, missing_extra
from paged_backend.kernels.base import Kernels
from paged_backend.models.architectures import spec_from_config
from paged_backend.models.decoder import Decoder
from paged_backend.models.spec import DecoderSpec
from paged_backend.models.tensors import fit

logger = logging.getLogger(__name__)

_LARGER = 1.5  # than in the files: what is told of quantised weights in memory


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. max_model_len: longest prompt + output it serves.

    decoder: native, or a ``TransformersModel``. spec: as the weights really are (see ``fit``).
    tokenizer_source: the tokenizer asked for, or else that of the checkpoint.
    """

    decoder: Any
    spec: DecoderSpec
    checkpoint: Checkpoint
    tokenizer_source: str
    max_model_len: int

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence, from the generation config (a number or a list), else the config."""
        eos = self.checkpoint.generation_config.get("eos_token_id")
        if eos is None:
            return self.spec.eos_token_ids
        return tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)


def load_model(config: EngineConfig, kernels: Kernels) -> LoadedModel:
    """Load ``config.model`` for ``kernels``.

    What has no native implementation runs through its transformers module (see ``models.transformers``) if it comes
    as safetensors. Raises ModelLoadError naming the file, tensor or setting (UnsupportedModelError if it has no
    implementation), and ValueError for a weight dtype the kernels do not have.
    """
    return build_model(config, kernels, load_checkpoint(resolve_model(config.model)))


def build_model(
    config: EngineConfig,
    kernels: Kernels,
    checkpoint: Checkpoint,
    through_transformers: bool = True,
    on_packed: Callable[[], None] = lambda: None,
) -> LoadedModel:
    """:func:`load_model` for a checkpoint that is open already; only natively without ``through_transformers``.

    on_packed: called now and then while weights are packed; what it raises ends the loading.
    """
    layers = checkpoint.config.get("num_hidden_layers")
    check_layers(layers, len(checkpoint.shapes), f"num_hidden_layers of {checkpoint.path}")
    try:
        spec = spec_from_config(checkpoint.config)
    except UnsupportedModelError as refusal:
        if not through_transformers or checkpoint.path.suffix == ".gguf":
            raise
        return _through_transformers(config, kernels, checkpoint, refusal)
    spec, weights = fit(checkpoint, spec)
    max_model_len = _context(config, spec, checkpoint)
    stored = config.quantization or config.dtype

    def packed() -> None:
        checkpoint.drop_pages()
        on_packed()

    decoder = Decoder(spec, weights, kernels, stored, max_model_len, packed)
    if stored == "auto" and 0 < _LARGER * checkpoint.quantized_bytes < decoder.nbytes():
        logger.warning(
            "%s: quantised weights of %.2f GB take %.2f GB in memory, as these kernels multiply no smaller form of "
            "the same values; quantization='int8' or 'int4' takes less and rounds them",
            checkpoint.path,
            checkpoint.quantized_bytes / 1e9,
            decoder.nbytes() / 1e9,
        )
    return _loaded(config, decoder, checkpoint, max_model_len)


def _through_transformers(
    config: EngineConfig, kernels: Kernels, checkpoint: Checkpoint, refusal: UnsupportedModelError
) -> LoadedModel:
    with missing_extra("huggingface", f"{refusal}; its module in transformers"):
        import torch
        import transformers  # noqa: F401  (here, so that its absence is noticed)

        from paged_backend.models.transformers.module import load_module

    try:
        dtype = config.activation_dtype if config.through_triton else config.dtype
        if config.threads is not None:  # of the whole process: modules have no other way to be told
            torch.set_num_threads(config.threads)
        module = load_module(checkpoint, config.quantization or dtype)
        return module_model(config, kernels, checkpoint, module.to(kernels.device))
    except UnsupportedModelError as second:
        raise UnsupportedModelError(f"{refusal}; nor does it run through transformers: {second}") from second


def module_model(config: EngineConfig, kernels: Kernels, checkpoint: Checkpoint, module: Any) -> LoadedModel:
    """A transformers module as a model to serve; it is taken over. Raises UnsupportedModelError."""
    from paged_backend.models.transformers.model import TransformersModel

    model = TransformersModel(module, kernels)
    return _loaded(config, model, checkpoint, _context(config, model.spec, checkpoint))


def _context(config: EngineConfig, spec: DecoderSpec, checkpoint: Checkpoint) -> int:
    max_model_len = config.max_model_len or spec.max_position
    if max_model_len > spec.max_position_limit:
        raise ModelLoadError(
            f"max_model_len {max_model_len} is beyond what {checkpoint.path} supports: "
            f"at most {spec.max_position_limit}"
        )
    return max_model_len


def _loaded(config: EngineConfig, model: Any, checkpoint: Checkpoint, max_model_len: int) -> LoadedModel:
    return LoadedModel(
        decoder=model,
        spec=model.spec,
        checkpoint=checkpoint,
        tokenizer_source=config.tokenizer or checkpoint.tokenizer_source,
        max_model_len=max_model_len,
    )
