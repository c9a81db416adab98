"""What a model's files say about it, looked at before anything is built on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_backend.errors import ModelLoadError
from paged_backend.sampling_params import SamplingParams

_MOST_LAYERS = (
    1000  # which tensors are missing is told layer by layer later; a damaged count would fill the memory
)


def check_layers(layers: Any, num_tensors: int, where: str) -> None:
    """Raise ModelLoadError for more layers than so many tensors can be of. where: the count stands, for messages."""
    if isinstance(layers, int) and layers > max(num_tensors, _MOST_LAYERS):
        raise ModelLoadError(f"{where} asks for {layers} layers, but there are only {num_tensors} tensors")


def check_generation_config(generation_config: Mapping[str, Any], where: str) -> None:
    """Raise ModelLoadError for defaults that no request could be sampled with. where: they stand, for messages."""
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = generation_config.get(name)
        ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelLoadError(f"{where}: {name} must be a token id or a list of them, got {value!r}")
    try:
        SamplingParams().resolved(generation_config)
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{where}: {error}") from error
