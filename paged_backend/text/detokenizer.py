"""IncrementalDetokenizer: token ids in, new text out, never a broken character.

A token's text depends on its neighbours: a character may be spread over several tokens, and many decoders
treat the first token of what they are given differently. So new tokens are decoded together with the few that
precede them, and the text of those is taken off again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from paged_backend.tokenization import Decoder

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 4  # prompt tokens that precede the first new one, at least
_REACH = 4  # a character has at most four bytes, so a context of so many more starts on a whole one
_LONGEST = 24  # pending tokens before old ones are let go
_RECENT = 12  # those that stay; three replacement characters, which can still change, stand for nine at most


class IncrementalDetokenizer:
    """Text of the tokens that follow ``prompt_token_ids``, piece by piece; O(1) per token.

    The pieces add up to the decoding of prompt and output together, less that of the prompt. A prompt that
    ends inside a character leaves that character, not the prompt, to the first piece. Replacement characters
    at the end are held back while further bytes could still complete them (three at most; none after
    :meth:`flush`). One liberty: where a byte-fallback decoder gives up a whole run of byte tokens because one
    of them is invalid, characters of the run that were complete, and shown, stay as they were.
    """

    __slots__ = (
        "_base",
        "_context",
        "_decoder",
        "_hidden",
        "_pending",
        "_shown",
        "_skip",
        "_special",
        "_text",
    )

    def __init__(
        self, tokenizer: Decoder, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._decoder = tokenizer
        self._skip = skip_special_tokens
        self._special = frozenset(tokenizer.special_ids) if skip_special_tokens else frozenset()
        self._context: list[int] = []  # tokens whose text is final, kept as left neighbours
        self._base = ""  # their text
        self._pending: list[int] = []  # tokens after the context
        self._text = ""  # text of the pending tokens
        self._shown = 0  # how much of it was returned
        # Text of a prompt that ends in a broken character: its last tokens are then the first pending ones.
        self._hidden = ""
        self._start(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """Take in one token; returns the text that became certain with it, often "" or several characters."""
        if token_id in self._special:
            return ""
        self._pending.append(token_id)
        text = self._text = self._decode_pending()
        if self._hidden and not text.startswith(self._hidden):
            # The prompt's last character was completed: it is new text.
            same = (a == b for a, b in zip(self._hidden, text))
            self._shown, self._hidden = sum(takewhile(bool, same)), ""
        whole = len(text.rstrip(_BROKEN))
        if whole == len(text):
            piece = text[self._shown :]
            self._settle()
            return piece
        # At most three of the replacement characters can be the beginning of a character.
        certain = max(whole, len(text) - 3)
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if len(self._pending) >= _LONGEST:
            piece += self._let_go()
        return piece

    def flush(self) -> str:
        """The text still held back, once no more tokens can come."""
        piece = self._text[self._shown :]
        self._settle()
        return piece

    def _start(self, prompt: Sequence[int]) -> None:
        tail: list[int] = []
        for token in reversed(prompt):
            if token not in self._special:
                tail.append(token)
                if len(tail) == _CONTEXT + _REACH:
                    break
        tail.reverse()
        # The context must neither begin nor end inside a character; up to three tokens may belong to one that
        # the output will complete.
        for cut in range(min(3, len(tail)) + 1):
            head = tail[: len(tail) - cut]
            for size in range(min(_CONTEXT, len(head)), len(head) + 1):
                context = head[len(head) - size :]
                text = self._decode(context)
                if not text.startswith(_BROKEN) and not text.endswith(_BROKEN):
                    self._context, self._base = context, text
                    self._hide(tail[len(head) :])
                    return
        self._hide(tail)

    def _hide(self, tokens: list[int]) -> None:
        self._pending = tokens
        self._hidden = self._text = self._decode_pending()
        self._shown = len(self._text)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip) if ids else ""

    def _decode_pending(self) -> str:
        if self._context:
            both = self._decode(self._context + self._pending)
            if both.startswith(self._base):
                return both[len(self._base) :]
            # A byte-fallback decoder gave up the characters that the context ends with; they were right.
        return self._decode(self._pending)

    def _settle(self) -> None:
        """Make the pending tokens the context of what follows."""
        # Tokens without text say nothing about their right neighbour, unless they stand at the very start.
        if self._pending and (self._text or not self._context):
            self._context = self._pending
            self._base = self._decode(self._context)
        self._pending, self._text, self._shown, self._hidden = [], "", 0, ""

    def _let_go(self) -> str:
        """Drop the oldest of many pending tokens; returns text that must be shown before that."""
        held = len(self._text) - self._shown
        recent = self._pending[-_RECENT:]
        text = self._decode(recent)
        if self._shown and len(text) > held and text[len(text) - held - 1 :] == self._text[self._shown - 1 :]:
            self._context, self._base, self._hidden = [], "", ""
            self._pending, self._text, self._shown = recent, text, len(text) - held
            return ""
        # Byte-fallback tokens that would be valid without the invalid ones before them.
        piece = self._text[self._shown :]
        self._pending = recent
        self._settle()
        return piece
