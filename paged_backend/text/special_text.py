"""Special tokens written out in what users say: found, and encoded as the text that they are.

A chat template mixes its own special tokens with what users wrote, and only before it is rendered can the two be told
apart. So special tokens in contents are broken by a mark, the template is rendered, and a second tokenizer over the
same vocabulary encodes the whole: it knows special tokens only under names that no text can hold, which the template's
own are given, and takes the marks out. Everything else is encoded as the model's own tokenizer does it, in one go.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MARKS = (*range(0xFDD0, 0xFDF0), *range(0x100000, 0x100100))
"""Characters that stand for nothing in texts; those that a text has all the same are not used with it."""


class SpecialText:
    """The special tokens of one tokenizer, as text. Safe to use from several threads.

    backend: a ``tokenizers.Tokenizer``. special_ids: the added tokens that are special, whatever they call themselves.
    """

    def __init__(self, backend: Any, special_ids: Collection[int]) -> None:
        self.backend = backend
        self.special_ids = frozenset(special_ids)
        self.added: dict[int, Any] = dict(sorted(backend.get_added_tokens_decoder().items()))
        self.texts = frozenset(
            token.content
            for index, token in self.added.items()
            if token.content and (token.special or index in special_ids)
        )
        self.pattern = _any_of(self.texts)
        self._prefixes = {text[:size] for text in self.texts for size in range(1, len(text))}
        self._longest = max(map(len, self.texts), default=0)
        # such tokens are sought in the normalized text, where others may look like them
        self._normalized = backend.normalizer is not None and any(t.normalized for t in self.added.values())
        self._usual: Marks | None = None

    def touches(self, value: Any) -> bool:
        """Whether some string in ``value`` (JSON data) has a special token in it, or ends as one begins."""
        return any(self._touches(text) for text in _strings(value))

    def _touches(self, text: str) -> bool:
        if self.pattern is None:
            return False
        if self.pattern.search(text) is not None or self.begun(text):
            return True
        if not self._normalized:
            return False
        return self.pattern.search(self.backend.normalizer.normalize_str(text)) is not None

    def begun(self, text: str) -> int:
        """How many of the last characters, white space aside, are the beginning of a special token."""
        text = text[-self._longest - 64 :].rstrip()
        return next(
            (s for s in range(min(self._longest, len(text)), 0, -1) if text[-s:] in self._prefixes), 0
        )

    def marks(self, text: str) -> Marks:
        """Marks that ``text``, the prompt without any, does not contain."""
        if self._usual is None:
            self._usual = Marks(self, chr(_MARKS[0]), chr(_MARKS[1]))
        if self._usual.fit(text):
            return self._usual
        free = [chr(m) for m in _MARKS if chr(m) not in text and _escaped(chr(m)) not in text]
        return Marks(self, free[0], free[1])


class Marks:
    """Two characters that the prompt does not have: one breaks special tokens in contents, one names the template's."""

    def __init__(self, special: SpecialText, breaks: str, seal: str) -> None:
        self._special = special
        self._break = breaks
        self._seal = seal
        content = f"(?P<content>(?:.{breaks})+)"
        tokens = _any_of(token.content for token in special.added.values() if token.content)
        self._parts = re.compile(content if tokens is None else f"{content}|{tokens.pattern}", re.DOTALL)
        self._sealed = _Sealed.build(special, breaks, seal)

    def fit(self, text: str) -> bool:
        """Whether ``text`` has none of them, written out or escaped."""
        return not any(form in text for mark in (self._break, self._seal) for form in (mark, _escaped(mark)))

    def put(self, value: Any) -> Any:
        """A copy of JSON data in which no special token is whole."""
        if isinstance(value, str):
            return self._broken(value)
        if isinstance(value, Mapping):
            return {self.put(key): self.put(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.put(item) for item in value]
        return value

    def _broken(self, text: str) -> str:
        if self._special.pattern is None:
            return text
        text = self._special.pattern.sub(lambda found: self._break_up(found[0]), text)
        size = self._special.begun(text)
        if not size:
            return text
        end = len(text.rstrip())
        return text[: end - size] + self._break_up(text[end - size : end]) + text[end:]

    def _break_up(self, text: str) -> str:
        return "".join(char + self._break for char in text)

    def strip(self, text: str) -> str:
        """A rendered prompt without the marks."""
        return self._plain(text).replace(self._break, "")

    def _plain(self, text: str) -> str:
        return text.replace(
            _escaped(self._break), self._break
        )  # templates may write strings as JSON, in ASCII

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt with marks; nothing is added at its ends."""
        text = self._plain(text)
        ids = self._sealed.encode(self._parts.sub(self._sealed_text, text))
        if ids is None:  # the vocabulary's own merges lead to a special token: its characters are parted
            ids = self._sealed.encode(self._parts.sub(self._parted_text, text), strict=False)
        return ids or []

    def _sealed_text(self, found: re.Match[str]) -> str:
        if found["content"] is not None:
            return found[0].replace(self._break, "")
        return self._seal + found[0] + self._seal if found[0] in self._special.texts else found[0]

    def _parted_text(self, found: re.Match[str]) -> str:
        return found[0] if found["content"] is not None else self._sealed_text(found)


@dataclass(frozen=True)
class _Sealed:
    """The second tokenizer. ids: the model's for those that tokens have here; None for the mark, which is left out."""

    backend: Any
    ids: Mapping[int, int | None]
    forbidden: frozenset[int]

    @classmethod
    def build(cls, special: SpecialText, breaks: str, seal: str) -> _Sealed:
        from tokenizers import AddedToken, Tokenizer

        backend = Tokenizer(special.backend.model)  # shared, not copied
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(special.backend, part) is not None:
                setattr(backend, part, getattr(special.backend, part))
        tokens: list[Any] = []
        for token in special.added.values():
            named = seal + token.content + seal if token.content in special.texts else token.content
            tokens.append(
                AddedToken(
                    named,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
            )
        tokens.append(AddedToken(breaks, normalized=False))
        size, model = backend.get_vocab_size(), special.backend.model
        fillers = 0
        while any(model.id_to_token(size + fillers + i) is not None for i in range(len(tokens))):
            fillers += 1  # a vocabulary with gaps: new ids must not be any of its own
        backend.add_tokens([AddedToken(f"{seal}{i}{seal}", normalized=False) for i in range(fillers)])
        backend.add_tokens(tokens)
        ids: dict[int, int | None] = {}
        for index, token in zip((*special.added, None), tokens):
            found = backend.token_to_id(token.content)
            if found is not None:
                ids[found] = index
        unknown = getattr(model, "unk_token", None)
        forbidden = special.special_ids - {None if unknown is None else special.backend.token_to_id(unknown)}
        return cls(backend, ids, frozenset(forbidden))

    def encode(self, text: str, strict: bool = True) -> list[int] | None:
        """None if some text became a special token and ``strict``."""
        found = self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if strict and any(index in self.forbidden and index not in self.ids for index in found):
            return None
        own = (self.ids.get(index, index) for index in found)
        return [index for index in own if index is not None]


def _escaped(mark: str) -> str:
    code = ord(mark)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def _strings(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """The leftmost of ``texts``, of several there the longest, as tokenizers match them. None for none."""
    words = sorted(set(texts))
    return re.compile(_trie(words), re.DOTALL) if words else None


def _trie(words: Sequence[str]) -> str:
    """One branch per letter: vocabularies have up to thousands of special tokens that begin alike."""
    start = _common(words)
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[len(start) : len(start) + 1], []).append(word[len(start) :])
    whole = rests.pop("", None) is not None
    branches = "|".join(_trie(rest) for rest in rests.values())
    if not branches:
        return re.escape(start)
    return f"{re.escape(start)}(?:{branches}){'?' if whole else ''}"


def _common(words: Sequence[str]) -> str:
    first, last = words[0], words[-1]  # sorted
    size = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[:size]
