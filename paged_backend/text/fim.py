"""Fill in the middle: prompts of models that write what belongs between two texts.

Such a model's vocabulary has tokens that say where the text before and the text after begin; which tokens, and which of
the two texts comes first, is a matter of its family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paged_backend.errors import RequestRejectedError
from paged_backend.tokenization import Tokenizer

_GLUE = "\n"
"""Stands before a text whose first word must not be given a space, and is cut off again."""


@dataclass(frozen=True, slots=True)
class FimFormat:
    """before, after: tokens that open the two texts. middle: the token behind them, None for none.

    after_first: the text after the gap comes first. ends: tokens that end what is filled in, beside end-of-sequence.
    """

    before: str
    after: str
    middle: str | None
    after_first: bool = False
    ends: tuple[str, ...] = ()


FORMATS = (
    # Qwen2.5-Coder, CodeGemma
    FimFormat(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    # StarCoder and StarCoder2, Granite Code; SantaCoder
    FimFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<fim_pad>", "<file_sep>", "<|endoftext|>")),
    FimFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    # DeepSeek-Coder
    FimFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (so it spells them)
    # CodeLlama
    FimFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    # Codestral
    FimFormat("[PREFIX]", "[SUFFIX]", None, after_first=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FillIn:
    """How one model is asked to fill in. stop_ids: tokens that end its answer."""

    tokenizer: Tokenizer
    form: FimFormat
    stop_ids: tuple[int, ...]

    def encode(self, before: str | Sequence[int], after: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids that ask for what belongs between ``before`` (text or ids) and ``after``."""
        token = self._id
        first = self.tokenizer.encode(before, False) if isinstance(before, str) else list(before)
        parts = [[token(self.form.before), *first], [token(self.form.after), *self._glued(after)]]
        if self.form.after_first:
            parts.reverse()
        bos = self.tokenizer.bos_token_id
        start: list[int] = []
        if bos is not None and add_special_tokens and bos in self.tokenizer.encode("", True):
            start.append(bos)
        end = [] if self.form.middle is None else [token(self.form.middle)]
        return [*start, *parts[0], *parts[1], *end]

    def _id(self, name: str) -> int:
        index = self.tokenizer.token_to_id(name)
        if index is None:
            raise RequestRejectedError(f"the tokenizer has no {name}")
        return index

    def _glued(self, text: str) -> list[int]:
        """Ids of ``text`` as it goes on behind other text, without the space that some tokenizers put first."""
        glue: list[int] = self.tokenizer.encode(_GLUE, False)
        both: list[int] = self.tokenizer.encode(_GLUE + text, False)
        if len(glue) > 1 and both[: len(glue)] == glue:  # a space and the line's end
            return both[len(glue) :]
        plain: list[int] = self.tokenizer.encode(text, False)
        return plain


def fill_in(tokenizer: Tokenizer) -> FillIn:
    """Raises :class:`RequestRejectedError` for a model that cannot."""
    for form in FORMATS:
        needed = [form.before, form.after, *([form.middle] if form.middle is not None else [])]
        ids = [tokenizer.token_to_id(name) for name in needed]
        if None not in ids:
            ends = [tokenizer.token_to_id(name) for name in form.ends]
            return FillIn(tokenizer, form, tuple(i for i in (*ids, *ends) if i is not None))
    raise RequestRejectedError(
        "suffix is not supported: this model's vocabulary has no tokens for filling in the middle "
        "(Qwen2.5-Coder, StarCoder2, CodeLlama, DeepSeek-Coder and Codestral have)"
    )
