"""Rope settings of a config.json, old style (rope_scaling) or new (rope_parameters), -> RopeSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.errors import UnsupportedModelError
from paged_backend.models.spec import RopeSpec

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
_REFUSED = ("mrope_section", "short_mscale", "long_mscale")


def rope_for_layers(
    config: Mapping[str, Any], architecture: str, layer_types: Sequence[str], head_dim: int
) -> tuple[tuple[int, ...], tuple[RopeSpec, ...]]:
    """Index of each layer's rope, and the distinct ropes.

    Raises UnsupportedModelError naming a setting that is not supported.
    """
    by_type = _parameters_by_type(config, architecture, layer_types)
    specs: list[RopeSpec] = []
    indices = []
    for kind in layer_types:
        spec = _rope_spec(by_type[kind], config, architecture, head_dim)
        if spec not in specs:
            specs.append(spec)
        indices.append(specs.index(spec))
    return tuple(indices), tuple(specs)


def _parameters_by_type(
    config: Mapping[str, Any], architecture: str, layer_types: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """rope parameters of each layer type that occurs, ``rope_theta`` filled in."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    nested = any(isinstance(given.get(kind), Mapping) for kind in ("full_attention", "sliding_attention"))
    theta = config.get("rope_theta")
    if architecture.startswith("Gemma3"):
        if given and not nested and not config.get("rope_scaling"):
            raise UnsupportedModelError(
                "rope_parameters of Gemma 3 must be given per layer type (full_attention, sliding_attention)"
            )
        # rope_scaling of the older files concerns the layers with full attention only
        given = given if nested else {"full_attention": given}
        nested = True
        thetas = {
            "full_attention": theta or 1e6,
            "sliding_attention": config.get("rope_local_base_freq") or 1e4,
        }
    else:
        thetas = dict.fromkeys(("full_attention", "sliding_attention"), theta or 1e4)
    result = {}
    for kind in set(layer_types):
        parameters = dict((given.get(kind) or {}) if nested else given)
        if parameters.get("rope_theta") is None:
            parameters["rope_theta"] = thetas[kind]
        if parameters.get("partial_rotary_factor") is None:
            parameters["partial_rotary_factor"] = config.get("partial_rotary_factor") or 1.0
        result[kind] = parameters
    return result


def _rope_spec(
    parameters: Mapping[str, Any], config: Mapping[str, Any], architecture: str, head_dim: int
) -> RopeSpec:
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if architecture == "Phi3ForCausalLM" and rope_type in ("su", "yarn"):
        rope_type = "longrope"  # what early Phi-3 files called it
    if rope_type not in _REQUIRED:
        raise UnsupportedModelError(
            f"rope_type {rope_type!r} is not supported; supported are {', '.join(_REQUIRED)}"
        )
    for key in _REQUIRED[rope_type]:
        if parameters.get(key) is None:
            raise UnsupportedModelError(
                f"rope_type {rope_type!r} needs {key!r} in rope_parameters (or rope_scaling)"
            )
    for key in _REFUSED:
        if key in parameters:
            raise UnsupportedModelError(f"{key!r} in rope_parameters is not supported")

    dim = int(head_dim * parameters["partial_rotary_factor"])
    if dim != head_dim and architecture != "Phi3ForCausalLM":
        raise UnsupportedModelError(f"partial_rotary_factor is not supported in {architecture}")
    if dim % 2 or dim < 2:
        raise UnsupportedModelError(
            f"rotary dimension {dim} (head_dim {head_dim} x partial_rotary_factor) must be even and positive"
        )
    max_position = int(config["max_position_embeddings"])
    spec: dict[str, Any] = {
        "rope_type": rope_type,
        "dim": dim,
        "theta": float(parameters["rope_theta"]),
        "max_position": max_position,
    }
    if rope_type == "default":
        return RopeSpec(**spec)
    original = max_position
    if rope_type in ("llama3", "yarn", "longrope"):
        # the top level wins over rope_parameters, as in transformers (Phi-3 keeps it there)
        original = int(
            config.get("original_max_position_embeddings")
            or parameters.get("original_max_position_embeddings")
            or max_position
        )
        spec["original_max_position"] = original
    spec["factor"] = float(parameters.get("factor") or max_position / original)
    if rope_type in ("yarn", "longrope"):
        spec["attention_factor"] = parameters.get("attention_factor")
    optional = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    }
    for key in optional.get(rope_type, ()):
        if parameters.get(key) is not None:
            spec[key] = parameters[key]
    if rope_type == "longrope":
        for key in ("short_factor", "long_factor"):
            factors = tuple(float(f) for f in parameters[key])
            if len(factors) != dim // 2:
                raise UnsupportedModelError(
                    f"{key} of rope_parameters must have {dim // 2} numbers, got {len(factors)}"
                )
            spec[key] = factors
    return RopeSpec(**spec)
