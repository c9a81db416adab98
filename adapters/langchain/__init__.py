"""LangChain on the shared engine: ``ChatPaged`` for chats, ``PagedLLM`` for plain completions."""

from __future__ import annotations

from paged_backend.errors import missing_extra

with missing_extra("langchain", "this adapter"):
    import langchain_core  # noqa: F401

from paged_backend.adapters.langchain.base import DeadlineError, InvalidRequestError, PromptTooLongError
from paged_backend.adapters.langchain.chat_models import ChatPaged
from paged_backend.adapters.langchain.llms import PagedLLM

__all__ = ["ChatPaged", "DeadlineError", "InvalidRequestError", "PagedLLM", "PromptTooLongError"]
