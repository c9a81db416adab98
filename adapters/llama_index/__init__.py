"""LlamaIndex on the shared engine: ``PagedLLM``."""

from __future__ import annotations

from paged_backend.errors import missing_extra

with missing_extra("llama-index", "this adapter"):
    import llama_index.core  # noqa: F401

from paged_backend.adapters.llama_index.llm import PagedLLM

__all__ = ["PagedLLM"]
