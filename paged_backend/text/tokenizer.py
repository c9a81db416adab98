"""Tokenizer: text and messages to ids and back, straight on the ``tokenizers`` library.

transformers takes seconds to import and is only asked where a model brings no ``tokenizer.json``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_backend.errors import RequestRejectedError
from paged_backend.text.special_text import SpecialText
from paged_backend.text.stop_strings import overlap
from paged_backend.text.token_bytes import TokenBytes
from paged_backend.token_ids import plain

if TYPE_CHECKING:
    import tokenizers

    from paged_backend.checkpoints.checkpoint import Checkpoint
    from paged_backend.text.chat_template import ChatTemplate

_LONG_TEXT = 2000  # characters; takes about a millisecond to encode
_MAX_OVERLAPS = 1024  # stop strings of which it is known whether they touch a special token
_MAX_TEMPLATES = 16  # compiled templates kept; callers may pass one of their own with each request


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads.

    backend: the ``tokenizers.Tokenizer`` that does the work. Padding and truncation are switched off: an
    engine never
        wants a prompt cut or filled silently.
    named: ``bos_token``, ``eos_token``, ... -> text, also visible to chat templates.
    templates: chat templates by name; ``default`` is the usual one, ``tool_use`` is taken when tools are
    given. source: where it came from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        source: str = "this tokenizer",
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.source = source
        self.templates = dict(templates or {})
        self.named_tokens = dict(named or {})
        added = backend.get_added_tokens_decoder()
        special = {index for index, token in added.items() if token.special}
        special |= {i for i in map(backend.token_to_id, self.named_tokens.values()) if i is not None}
        self.special_ids = frozenset(special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._compiled: dict[str, ChatTemplate] = {}
        self._token_bytes: TokenBytes | None = None
        self._special_text: SpecialText | None = None
        self._special_texts: list[str] | None = None
        self._overlapping: dict[str, bool] = {}

    def __repr__(self) -> str:
        return f"Tokenizer({self.source!r}, vocab_size={self.vocab_size})"

    def encode(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """Ids of ``text``. With ``add_special_tokens`` bos and eos as the model's own settings say; special
        tokens written out in ``text`` become their ids either way, unless ``split_special_tokens``."""
        text = _as_text(text)
        if split_special_tokens and self._special.touches(text):
            marks = self._special.marks(text)
            return self._with_ends(marks.encode(marks.put(text)), add_special_tokens)
        if len(text) > _LONG_TEXT:  # only the batch calls let other Python threads run meanwhile
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``, with no clean-up of spaces. Unknown ids yield nothing, broken UTF-8 yields
        U+FFFD."""
        return self.backend.decode(list(plain(ids)), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, index: int) -> str | None:
        """The vocabulary's spelling of an id, None if there is none."""
        return self.backend.id_to_token(index) if index >= 0 else None

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token stands for, maybe only a part of a character; b"" for unknown ids."""
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(self.backend)
        return self._token_bytes(index)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def overlaps_special(self, text: str) -> bool:
        """Whether ``text`` may lie, in whole or in part, in that of a special token."""
        if self._special_texts is None:
            self._special_texts = [self.decode([i], skip_special_tokens=False) for i in self.special_ids]
        found = self._overlapping.get(text)
        if found is None:
            found = any(overlap(text, special) for special in self._special_texts if special)
            if len(self._overlapping) >= _MAX_OVERLAPS:
                self._overlapping.clear()
            self._overlapping[text] = found
        return found

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def bos_token(self) -> str | None:
        return self.named_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.named_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def chat_template(self) -> str | None:
        """The default chat template, None if the model has none."""
        return self.templates.get("default")

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text for ``messages``.

        tools: JSON schemas or documented functions. add_generation_prompt: open the assistant's turn; by
        default yes, unless ``continue_final_message`` asks to go on with the last message. chat_template: a
        template, or the name of one of the model's. kwargs are handed to the template. Raises
        ``RequestRejectedError``.
        """
        template, arguments, variables = self._template_call(
            messages, tools, add_generation_prompt, continue_final_message, chat_template, kwargs
        )
        return template.render(*arguments, **variables)

    def encode_chat(self, messages: Sequence[Any], **kwargs: Any) -> list[int]:
        """Ids of ``render_chat(messages, **kwargs)``."""
        return self.render_chat(messages, **kwargs)[1]

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
        """(text, ids) of a chat; parameters are those of ``apply_chat_template``.

        add_special_tokens: those of ``encode``; the template has written bos where the model wants it.
        split_special_tokens: what stands in messages, tools and documents is text and never a control token.
        """
        options = (messages, tools, add_generation_prompt, continue_final_message, chat_template)
        if not split_special_tokens:
            text = self.apply_chat_template(*options, **kwargs)
            return text, self.encode(text, add_special_tokens)
        template, arguments, variables = self._template_call(*options, kwargs)
        text, encode = template.render_with(self._special, *arguments, **variables)
        if encode is None:
            return text, self.encode(text, add_special_tokens)
        _as_text(text)
        return text, self._with_ends(encode(), add_special_tokens)

    def _template_call(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        chat_template: str | None,
        kwargs: Mapping[str, Any],
    ) -> tuple[ChatTemplate, tuple[Any, ...], dict[str, Any]]:
        if continue_final_message and add_generation_prompt:
            raise RequestRejectedError("give add_generation_prompt or continue_final_message, not both")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        template = self._template(self.template_source(chat_template, bool(tools)))
        arguments = (messages, tools or None, add_generation_prompt, continue_final_message)
        return template, arguments, {**self.named_tokens, **kwargs}

    def _with_ends(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        """``ids`` between what ``encode(add_special_tokens=True)`` puts around a text."""
        if not add_special_tokens:
            return ids
        bare, whole = self.encode("a", False), self.encode("a", True)
        start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return [*whole[:start], *ids, *whole[start + len(bare) :]]

    @property
    def _special(self) -> SpecialText:
        if self._special_text is None:
            self._special_text = SpecialText(self.backend, self.special_ids)
        return self._special_text

    def template_source(self, wanted: str | None = None, tools: bool = False) -> str:
        """The Jinja text that ``apply_chat_template(chat_template=wanted)`` takes. Raises ``RequestRejectedError``."""
        if wanted is not None:
            return self.templates.get(wanted, wanted)
        if tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" in self.templates:
            return self.templates["default"]
        if self.templates:
            raise RequestRejectedError(
                f"{self.source} has several chat templates and no default; pass chat_template= one of "
                f"{', '.join(sorted(self.templates))}"
            )
        raise RequestRejectedError(
            f"{self.source} has no chat template: pass chat_template=<Jinja text>, take an instruction-tuned "
            "model, or give a plain prompt to generate()"
        )

    def _template(self, text: str) -> ChatTemplate:
        from paged_backend.text.chat_template import ChatTemplate

        template = self._compiled.get(text)
        if template is None:
            template = ChatTemplate(text)
            if len(self._compiled) >= _MAX_TEMPLATES:
                self._compiled.clear()
            self._compiled[text] = template
        return template


def _as_text(text: Any) -> str:
    if not isinstance(text, str):
        raise RequestRejectedError(f"a prompt must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestRejectedError(f"the prompt is not valid Unicode: {error}") from error
    return text


def load_tokenizer(path_or_id: str | Path, checkpoint: Checkpoint | None = None) -> Tokenizer:
    """The tokenizer of a model folder, a ``.gguf`` file, a hub id or ``demo``.

    checkpoint: the opened model, whose file is then not parsed a second time. Raises ``ModelLoadError``
    naming what is missing.
    """
    from paged_backend.checkpoints.gguf_metadata import GGUFFile, demo_path, first_part
    from paged_backend.text.hf_tokenizer import fetch, read_folder

    if checkpoint is not None:
        opened = getattr(checkpoint.tensors, "file", None)
        if isinstance(opened, GGUFFile) and str(path_or_id) in (
            "demo",
            str(opened.path),
            str(checkpoint.path),
        ):
            return _from_gguf(opened)
    path = demo_path() if str(path_or_id) == "demo" else Path(path_or_id)
    if path.suffix == ".gguf":
        return _from_gguf(GGUFFile(first_part(path)))
    if path.is_file():
        path = path.parent
    if not path.is_dir():
        path = fetch(str(path_or_id))
    if not (path / "tokenizer.json").is_file():
        candidates = {first_part(file) for file in path.glob("*.gguf")}
        if len(candidates) == 1:
            return _from_gguf(GGUFFile(candidates.pop()))
    return Tokenizer(*read_folder(path), str(path))


def _from_gguf(file: Any) -> Tokenizer:
    from paged_backend.text.gguf_tokenizer import build_tokenizer

    built = build_tokenizer(file)
    return Tokenizer(built.backend, built.named, built.templates, str(file.path))
