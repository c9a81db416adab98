"""Checkpoint: a model as it lies on disk, the same object whether it came from safetensors or from GGUF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paged_backend.kernels.weights import Weight

TensorSource = Callable[[], Weight]


@dataclass(frozen=True)
class Checkpoint:
    """Config and tensors of one model; nothing is read until a tensor is asked for.

    config: the content of Hugging Face's ``config.json`` (``architectures``, ``hidden_size``, ...).
    tensors: Hugging Face tensor name (``model.embed_tokens.weight``, ``lm_head.weight``,
        ``model.layers.0.self_attn.q_proj.weight``, ...) -> function that reads it. Each call reads anew, as a
        rule as a view of the memory-mapped file. Arrays of any float dtype (``kernels.array`` has bfloat16), or blocks
        of a quantised format; linears are [out, in] as torch has them, query and key rows in Hugging Face's
        "rotate half" order. A tied model may leave ``lm_head.weight`` out.
    shapes: tensor name -> shape, known without reading the tensor.
    generation_config: the content of ``generation_config.json``, {} if there is none.
    path: the folder or file the model came from, for messages and as registry key.
    integers: what else the file has: tensor name -> (dtype as the file calls it, function that reads it). Buffers such
        as masks and positions, or weights in a form that has no reader here.
    drop_pages: gives back the memory that reading tensors has taken, unless somebody has written to them; they may be
        read again.
    quantized_bytes: what all tensors of a quantised folder take in its files; 0 for other models.
    tokenizer_source: what ``AutoTokenizer.from_pretrained`` takes: a folder or file path, or a hub id.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorSource]
    shapes: Mapping[str, tuple[int, ...]]
    generation_config: Mapping[str, Any]
    path: Path
    tokenizer_source: str
    integers: Mapping[str, tuple[str, TensorSource]] = field(default_factory=dict)
    drop_pages: Callable[[], None] = lambda: None
    quantized_bytes: int = 0
