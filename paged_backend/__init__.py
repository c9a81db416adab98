"""paged_backend: a paged-attention LLM engine that other frameworks use as their backend.

Importing the package is light (no torch, no transformers); every public name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "llm",
    "EngineConfig": "config",
    "SamplingParams": "sampling_params",
    "RequestOutputKind": "sampling_params",
    "StructuredOutputs": "constrain.options",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestMetrics": "outputs",
    "get_engine": "engine.registry",
    "PagedBackendError": "errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "PagedBackendError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
    "get_engine",
]

if TYPE_CHECKING:
    from paged_backend.config import EngineConfig
    from paged_backend.constrain.options import StructuredOutputs
    from paged_backend.engine.registry import get_engine
    from paged_backend.errors import PagedBackendError
    from paged_backend.llm import LLM
    from paged_backend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from paged_backend.sampling_params import RequestOutputKind, SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
