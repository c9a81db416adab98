"""LangChain on the shared engine: ``ChatPaged`` for chats, ``PagedLLM`` for plain completions."""

from __future__ import annotations

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise ImportError("this adapter needs langchain-core: pip install 'paged-backend[langchain]'") from error

from paged_backend.adapters.langchain.base import DeadlineError, InvalidRequestError, PromptTooLongError
from paged_backend.adapters.langchain.chat_models import ChatPaged
from paged_backend.adapters.langchain.llms import PagedLLM

__all__ = ["ChatPaged", "DeadlineError", "InvalidRequestError", "PagedLLM", "PromptTooLongError"]
