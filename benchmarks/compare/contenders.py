"""Who takes part: our variants (``--variant NAME[:option=value,...]``) and the peers
(``--peer NAME[:option=value,...]=PYTHON``)."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "peers"

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "auto": {},
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "reference": {"kernels": "reference"},
}
"""Engine options of our variants; more can be given after a colon."""

_TRANSFORMERS = {"weights": "hf", "dtype": "float32"}
PEERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "transformers": ("run_transformers.py", {**_TRANSFORMERS, "mode": "single"}),
    "transformers-batch": ("run_transformers.py", {**_TRANSFORMERS, "mode": "batch"}),
    "transformers-generate-batch": ("run_transformers.py", {**_TRANSFORMERS, "mode": "continuous"}),
    "vllm": ("run_vllm.py", {"weights": "hf", "dtype": "float32"}),
    "openvino": ("run_openvino.py", {"weights": "f16"}),
    "llama.cpp": ("run_llama_cpp.py", {"weights": "f16"}),
}
"""Worker and default options of each peer. weights: ``hf`` (in the peer's dtype) or a GGUF type (f16, q8_0, q4_0)."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table. format: what the model must be exported to, None for the model as it is.

    python: its interpreter. worker: the script. options: for the worker. limit: run only the first requests.
    """

    label: str
    python: str
    worker: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    format: str | None = None
    model: str | None = None
    limit: int | None = None
    ours: bool = False


def parse_variant(text: str, python: str) -> Contender:
    """From ``bf16``, ``int8:max_num_batched_tokens=256`` or ``anything:dtype=float32,kernels=c``. Raises ValueError."""
    name, options = _split(text)
    limit = options.pop("requests", None)
    if name not in VARIANTS and not options:
        raise ValueError(
            f"unknown variant {name!r}: choose one of {', '.join(VARIANTS)}, or give its engine options after a colon"
        )
    merged = {**VARIANTS.get(name, {}), **options}
    return Contender(f"ours {text}", python, WORKERS / "run_ours.py", merged, limit=limit, ours=True)


def parse_peer(text: str) -> Contender:
    """From ``NAME[:option=value,...]=PYTHON``. Raises ValueError naming what is wrong."""
    spec, equals, python = text.rpartition("=")
    if not equals or not python:
        raise ValueError(f"expected NAME=PYTHON (or NAME:option=value,...=PYTHON), got {text!r}")
    name, options = _split(spec)
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}: choose one of {', '.join(PEERS)}")
    worker, defaults = PEERS[name]
    merged = {**defaults, **options}
    weights, model, limit = merged.pop("weights"), merged.pop("model", None), merged.pop("requests", None)
    kinds = ("hf",) if defaults["weights"] == "hf" else ("f16", "q8_0", "q4_0")
    if weights not in kinds:
        raise ValueError(f"{name}: weights must be one of {', '.join(kinds)}, got {weights!r}")
    if weights == "hf":
        # whatever is not one of the two folders' own types is converted by the peer
        format_ = "hf-bfloat16" if merged["dtype"] == "bfloat16" else "hf-float32"
    else:
        format_ = f"gguf-{weights}"
    shown = [f"{key}={value}" for key, value in options.items() if key not in ("dtype", "weights")]
    label = " ".join([name, merged["dtype"] if weights == "hf" else weights, *shown])
    return Contender(label, python, WORKERS / worker, merged, None if model else format_, model, limit)


def make_contenders(variants: Iterable[str], peers: Iterable[str], python: str) -> list[Contender]:
    """Ours first, then the peers, in the order given. Raises ValueError also for a row that is there twice."""
    made = [parse_variant(v, python) for v in variants] + [parse_peer(p) for p in peers]
    if not made:
        raise ValueError("nobody takes part: give at least one --variant or --peer")
    labels = [c.label for c in made]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"{label!r} is there twice")
    return made


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """``name:a=1,b=x`` -> name and options; values are Python literals where they look like one, else text."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise ValueError(f"expected option=value after the colon, got {item!r} in {text!r}")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    if not name:
        raise ValueError(f"no name before the colon in {text!r}")
    return name, options
