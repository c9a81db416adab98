"""Which tensors a decoder is made of, and the check of a checkpoint against them."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from paged_backend.checkpoints.checkpoint import Checkpoint, TensorSource
from paged_backend.errors import ModelLoadError
from paged_backend.kernels.array import float32
from paged_backend.kernels.weights import same_values, to_dense
from paged_backend.models.spec import DecoderSpec

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

# computed anew, whatever a checkpoint says
_BUFFER = re.compile(r"(rotary_emb\.\w+|masked_bias|attn\.bias|position_ids|attention_mask|causal_mask)$")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXTRA = re.compile(r"model\.(mtp|v_head|value_head|score|classifier)\w*\.")
_TOLD = 8  # names in a log line
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def expected_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor name -> shape of everything the decoder reads (without the head if it is tied)."""
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_size, kv_size = spec.num_heads * dim, spec.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied:
        shapes[HEAD] = (spec.vocab_size, hidden)

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for i in range(spec.num_layers):
        at = f"model.layers.{i}."
        if spec.fused_qkv:
            linear(f"{at}self_attn.qkv_proj", q_size + 2 * kv_size, hidden, spec.qkv_bias)
        else:
            linear(f"{at}self_attn.q_proj", q_size, hidden, spec.qkv_bias)
            linear(f"{at}self_attn.k_proj", kv_size, hidden, spec.qkv_bias)
            linear(f"{at}self_attn.v_proj", kv_size, hidden, spec.qkv_bias)
        linear(f"{at}self_attn.o_proj", hidden, q_size, spec.out_bias)
        if spec.qk_norm:
            shapes[f"{at}self_attn.q_norm.weight"] = shapes[f"{at}self_attn.k_norm.weight"] = (dim,)
        if spec.fused_gate_up:
            linear(f"{at}mlp.gate_up_proj", 2 * inner, hidden, spec.mlp_bias)
        else:
            linear(f"{at}mlp.gate_proj", inner, hidden, spec.mlp_bias)
            linear(f"{at}mlp.up_proj", inner, hidden, spec.mlp_bias)
        linear(f"{at}mlp.down_proj", hidden, inner, spec.mlp_bias)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if spec.sandwich_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for norm in norms:
            shapes[f"{at}{norm}.weight"] = (hidden,)
    return shapes


def fit(checkpoint: Checkpoint, spec: DecoderSpec) -> tuple[DecoderSpec, dict[str, TensorSource]]:
    """The tensors of ``spec`` by name, checked, and the spec with ``tied`` as the checkpoint really is.

    What the decoder does not use is left alone and said in one log line. Raises ModelLoadError naming every tensor
    that is missing, the first of a wrong shape, and the first that the decoder would need to give right results.
    """
    sources, shapes = dict(checkpoint.tensors), dict(checkpoint.shapes)
    integers = {name: dtype for name, (dtype, _) in checkpoint.integers.items()}
    if spec.architecture.endswith("ForConditionalGeneration"):
        sources, shapes, integers = _text_names(sources), _text_names(shapes), _text_names(integers)
    spec = _resolve_tying(sources, shapes, spec, checkpoint.path)
    expected = expected_shapes(spec)
    check_missing(checkpoint.path, spec.architecture, [n for n in expected if n not in sources], integers)
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise ModelLoadError(
                f"tensor {name!r} in {checkpoint.path} has shape {tuple(shapes[name])}, but config.json "
                f"asks for {shape}"
            )
    left = [
        name
        for name in (*sources, *integers)
        if name not in expected and not (name == HEAD and spec.tied) and not _BUFFER.search(name)
    ]
    if checkpoint.quantized_bytes:
        left = [name for name in left if not _adds_nothing(name, sources)]
    parts = {name.rpartition(".")[0] for name in expected}
    for name in left:
        if name.rpartition(".")[0] in parts or _inside(name, spec.num_layers):
            raise ModelLoadError(
                f"{checkpoint.path} has a tensor {name!r} that {spec.architecture} has no use for: its "
                "config.json does not describe these weights"
            )
    tell_unused(checkpoint.path, left)
    return spec, {name: sources[name] for name in expected}


def _adds_nothing(name: str, sources: Mapping[str, TensorSource]) -> bool:
    """Whether it is a bias of zeros: some tools that quantise write one for each linear, needed or not."""
    return name.endswith(".bias") and name in sources and not float32(to_dense(sources[name]())).any()


def check_missing(path: Path, owner: str, names: Sequence[str], integers: Mapping[str, str]) -> None:
    """ModelLoadError that names all of ``names``. integers: dtype of each tensor that is no float."""
    wrong = [name for name in names if name in integers]
    if wrong:
        raise ModelLoadError(
            f"tensor {wrong[0]!r} in {path} has dtype {integers[wrong[0]]}; only float weights are supported"
        )
    if not names:
        return
    hint = ""
    if HEAD in names:
        hint = "; if the head is the embedding, set tie_word_embeddings to true in config.json"
    listed = ", ".join(map(repr, names))
    raise ModelLoadError(f"{path} has no tensor {listed}, which {owner} needs{hint}")


def tell_unused(path: Path, names: Sequence[str]) -> None:
    """One log line for tensors that no model of this kind uses: extra heads, layers that predict further tokens."""
    if names:
        more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
        logger.info("%s: tensors that are not used: %s%s", path, ", ".join(names[:_TOLD]), more)


def _inside(name: str, num_layers: int) -> bool:
    """Whether it stands in the decoder itself, which then is another than its config says. Layers beyond the last are
    for training, or for guessing further tokens."""
    layer = _LAYER.match(name)
    if layer is not None:
        return int(layer[1]) < num_layers
    return name.startswith("model.") and _EXTRA.match(name) is None


def _text_names(tensors: Mapping[str, _T]) -> dict[str, _T]:
    """Names of the text model only, as a text-only checkpoint has them (both layouts in use for Gemma 3)."""
    renamed = {}
    for name, value in tensors.items():
        if name.startswith(("vision_tower.", "multi_modal_projector.", "model.vision_tower.")):
            continue
        if name.startswith("model.multi_modal_projector."):
            continue
        name = name.removeprefix("language_model.")
        renamed[name.replace("model.language_model.", "model.", 1)] = value
    return renamed


def _resolve_tying(
    sources: dict[str, TensorSource], shapes: dict[str, tuple[int, ...]], spec: DecoderSpec, path: Path
) -> DecoderSpec:
    """What is in the file decides, as in transformers: a head that differs from the embedding is used."""
    if not spec.tied or HEAD not in sources:
        return spec
    if EMBEDDING not in sources:
        sources[EMBEDDING], shapes[EMBEDDING] = sources[HEAD], shapes[HEAD]
        return spec
    if shapes[HEAD] == shapes[EMBEDDING] and same_values(sources[HEAD](), sources[EMBEDDING]()):
        return spec
    logger.warning(
        "%s says tie_word_embeddings, yet has an lm_head that differs from the embedding: using that head. "
        "Set tie_word_embeddings to false in its config.json to silence this.",
        path,
    )
    return dataclasses.replace(spec, tied=False)
