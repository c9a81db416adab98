"""What is needed of a tokenizer, by those who do not care whose it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from paged_backend.errors import RequestRejectedError


class Decoder(Protocol):
    """From ids to text. ``decode`` leaves out exactly ``special_ids`` when it skips specials."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token stands for, maybe only a part of a character."""
        ...

    def overlaps_special(self, text: str) -> bool:
        """Whether ``text`` may lie, in whole or in part, in that of a special token."""
        ...


class Tokenizer(Decoder, Protocol):
    """From text to ids and back. ``vocab_size``: every id is below it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; raises :class:`RequestRejectedError` for what is no text."""
        ...

    def id_to_token(self, index: int) -> str | None:
        """The vocabulary's spelling of an id, None if there is none."""
        ...

    def token_to_id(self, token: str) -> int | None: ...


class ChatTokenizer(Tokenizer, Protocol):
    """One that knows how its model is talked to. ``templates``: Jinja texts by name."""

    @property
    def templates(self) -> Mapping[str, str]: ...

    @property
    def chat_template(self) -> str | None:
        """The usual template, None if the model has none."""
        ...

    def render_chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        add_special_tokens: bool = False,
        split_special_tokens: bool = True,
        **kwargs: Any,
    ) -> tuple[str, list[int]]:
        """(prompt text, ids) of ``messages``. Raises :class:`RequestRejectedError`."""
        ...

    def template_source(self, wanted: str | None = None, tools: bool = False) -> str:
        """The Jinja text that ``render_chat(chat_template=wanted)`` takes."""
        ...


T = TypeVar("T", bound=Tokenizer)


def needed(tokenizer: T | None) -> T:
    """``tokenizer``; raises :class:`RequestRejectedError` for a model that brought none."""
    if tokenizer is None:
        raise RequestRejectedError(
            "this model has no tokenizer: give token ids, or tokenizer= with its folder"
        )
    return tokenizer
