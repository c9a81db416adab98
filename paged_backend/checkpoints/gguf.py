"""Checkpoints from GGUF files: config and tensors as Hugging Face would name and lay them out.

What llama.cpp's converters change on the way in is undone here: their short names, the interleaved query and
key rows of the ``llama`` architecture, and the ``+ 1`` they add to Gemma's norm weights. ``gguf_config``
rebuilds the config.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paged_backend.checkpoints.checkpoint import Checkpoint, TensorSource
from paged_backend.checkpoints.gguf_config import build_config, build_generation_config
from paged_backend.checkpoints.gguf_metadata import GGUFFile, TensorInfo, demo_path, open_parts
from paged_backend.checkpoints.mapped_file import drop_pages
from paged_backend.errors import ModelLoadError, UnsupportedModelError
from paged_backend.kernels.array import BFLOAT16, float32
from paged_backend.kernels.weights import GGMLBlocks, Weight

logger = logging.getLogger(__name__)

__all__ = ["GGUFTensors", "demo_path", "load_gguf"]

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# rope tensors are part of the config, not of the weights; attn_rot_embd is what old converters kept of a
# buffer; cls is the head of a classifier
_NOT_WEIGHTS = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
    r"|cls(\.output)?\.(weight|bias)"
)
_ANY_LAYER = re.compile(r"blk\.(\d+)\.")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = re.compile(r"(\w+)\.(weight|bias)")
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16}
_DEMO_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""What the model card of SmolLM2-135M-Instruct samples with; at temperature 1 so small a model writes gibberish."""


class GGUFTensors(Mapping[str, TensorSource]):
    """Tensors of a GGUF file (or of its parts) under Hugging Face names.

    Calling a value reads the tensor, as a view of the mapped file: float32, float16 and bfloat16 in that dtype,
    everything else as :class:`GGMLBlocks`.
    """

    def __init__(self, files: list[GGUFFile], config: Mapping[str, Any]) -> None:
        self.file = files[0]
        self._config = config
        self._entries: dict[str, tuple[GGUFFile, TensorInfo]] = {}
        architecture = self.file.metadata["general.architecture"]
        self._norm_plus_one = architecture.startswith("gemma")
        self._interleaved = architecture in ("llama", "mistral")
        unused: list[str] = []
        for file in files:
            for name, info in file.tensors.items():
                layer = _ANY_LAYER.match(name)
                beyond = layer is not None and int(layer[1]) >= int(config["num_hidden_layers"])
                if beyond or _NOT_WEIGHTS.fullmatch(name):
                    unused += [name] if beyond else []
                    continue
                hf_name = _hf_name(name, architecture)
                if hf_name is None:
                    raise UnsupportedModelError(
                        f"{file.path}: tensor {name!r} has no place in the architecture {architecture!r}"
                    )
                if hf_name in self._entries:
                    raise ModelLoadError(f"{file.path}: tensor {name!r} appears in two parts of the model")
                self._entries[hf_name] = (file, info)
        if unused:  # they guess further tokens
            logger.info("%s: %d tensors of layers beyond the last are not used", self.file.path, len(unused))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> TensorSource:
        return partial(self._read, name, *self._entries[name])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, (_, info) in self._entries.items()}

    def _read(self, name: str, file: GGUFFile, info: TensorInfo) -> Weight:
        raw = file.raw(info.name)
        if self._interleaved and (heads := self._rotary_heads(name)):
            raw = _halves(raw, heads, info, file)
        source = f"{file.path}: tensor {info.name!r}"
        if info.type.name not in _DTYPES:
            rows = 1 if len(info.shape) == 1 else info.shape[0]
            blocks = GGMLBlocks(raw, info.type, (rows, info.shape[-1]), source)
            if len(info.shape) == 2:
                return blocks
            tensor = blocks.to_dense()
        else:
            tensor = raw.view(_DTYPES[info.type.name])
        if self._norm_plus_one and name.endswith("norm.weight"):
            tensor = float32(tensor) - np.float32(1)
        return tensor.reshape(info.shape)

    def _rotary_heads(self, name: str) -> int:
        if ".q_proj." in name:
            return int(self._config["num_attention_heads"])
        return int(self._config["num_key_value_heads"]) if ".k_proj." in name else 0


def load_gguf(path: str | Path) -> Checkpoint:
    """Open a GGUF file as a ``Checkpoint``; of a model in several parts, any one of them.

    Reads the header only. The demo model's file comes with the sampling defaults of its model card.
    Raises ``ModelLoadError`` for a missing or damaged file (naming file and tensor)
    and ``UnsupportedModelError`` for an architecture, setting or tensor without an implementation.
    """
    path = Path(path)
    files = open_parts(path)
    try:
        config = build_config(files)
        tensors = GGUFTensors(files, config)
        generation_config = build_generation_config(files[0])
        if _is_demo(path):
            generation_config.update(_DEMO_SAMPLING)
    except ModelLoadError as error:
        if str(files[0].path.parent) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    return Checkpoint(
        config=config,
        tensors=tensors,
        shapes=tensors.shapes(),
        generation_config=generation_config,
        path=path,
        drop_pages=partial(drop_pages, [file.mapped for file in files]),
        tokenizer_source=str(path),
    )


def _is_demo(path: Path) -> bool:
    try:
        return demo_path().samefile(path)
    except (ModelLoadError, OSError):  # it is not installed
        return False


def _hf_name(name: str, architecture: str) -> str | None:
    """Hugging Face's name of a tensor; None if the architecture has no such tensor."""
    if match := _LAYER.fullmatch(name):
        layer, short, kind = match.groups()
        long = _SANDWICH_NAMES.get(short) if architecture in ("gemma2", "gemma3") else None
        if short == "ffn_up" and architecture == "phi3":
            long = "mlp.gate_up_proj"  # one matrix, gate rows first, as in Hugging Face's model
        long = long or _LAYER_NAMES.get(short)
        return long and f"model.layers.{layer}.{long}.{kind}"
    match = _TOP.fullmatch(name)
    return f"{_TOP_NAMES[match[1]]}.{match[2]}" if match and match[1] in _TOP_NAMES else None


def _halves(raw: np.ndarray, heads: int, info: TensorInfo, file: GGUFFile) -> np.ndarray:
    """Query or key rows from llama.cpp's order (pairs that rotate together adjacent) to the halves of Hugging
    Face.

    Works on packed rows: a row is a whole number of blocks, and there is less to move before it is expanded.
    """
    rows = info.shape[0]
    if rows % (2 * heads):
        raise ModelLoadError(
            f"{file.path}: tensor {info.name!r} has {rows} rows, not a multiple of 2 x {heads} heads"
        )
    pairs = raw.reshape(heads, rows // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
