"""Reply: one answer of a chat while it comes, for every route that answers chats."""

from __future__ import annotations

from collections.abc import Sequence

from paged_backend.outputs import CompletionOutput
from paged_backend.toolcalls import ReplyDelta, ToolCallDelta, ToolCallParser


class Reply:
    """One choice while it comes: plain text, or text and calls. Streams and whole answers are made of the same deltas.

    ``content`` and ``calls`` (complete deltas, one per call) are what has come so far. parser: None where the text is
    the content.
    """

    def __init__(self, parser: ToolCallParser | None) -> None:
        self.content = ""
        self.calls: list[ToolCallDelta] = []
        self.finish_reason: str | None = None
        self._parser = parser

    def push(self, output: CompletionOutput) -> ReplyDelta:
        """Take in what is new; returns what of it is certain, with at most one delta per call."""
        parser = self._parser
        if parser is None:
            self.content += output.text
            self.finish_reason = output.finish_reason
            return ReplyDelta(output.text)
        pieces = [parser.push(output.text)]
        if output.finished:
            pieces.append(parser.finish(output.finish_reason == "length"))
            lost = [call.arguments for call in parser.reply.invalid if call.name is None]
            pieces.append(
                ReplyDelta("".join(lost))
            )  # calls that are none: their text is all there is to give
            self.finish_reason = parser.reply.finish_reason(output.finish_reason)
        delta = ReplyDelta("".join(piece.content for piece in pieces))
        delta.calls = _one_each([call for piece in pieces for call in piece.calls])
        self.content += delta.content
        self.calls = _one_each([*self.calls, *delta.calls])
        return delta


def _one_each(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    merged: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        first = merged.get(delta.index)
        if first is not None:
            delta = ToolCallDelta(
                delta.index, first.id or delta.id, first.name or delta.name, first.arguments + delta.arguments
            )
        merged[delta.index] = delta
    return list(merged.values())
