"""LlamaIndex on the shared engine: ``PagedLLM``."""

from __future__ import annotations

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        "this adapter needs llama-index-core: pip install 'paged-backend[llama-index]'"
    ) from error

from paged_backend.adapters.llama_index.llm import PagedLLM

__all__ = ["PagedLLM"]
