"""Reply: one answer of a chat while it comes, for every route that answers chats."""

from __future__ import annotations

from collections.abc import Sequence

from paged_backend.outputs import CompletionOutput
from paged_backend.text.pieces import Pieces
from paged_backend.toolcalls import ReasoningParser, ReplyDelta, ToolCallDelta, ToolCallParser


class Reply:
    """One choice while it comes: text, or text and calls. Streams and whole answers are made of the same deltas.

    parser: None where the text is the content. reasoning: parts thoughts from the text; without it they stay in the
    content. ``content``, ``reasoning`` and ``calls`` (complete deltas, one per call) are what has come so far.
    """

    def __init__(self, parser: ToolCallParser | None, reasoning: ReasoningParser | None = None) -> None:
        self._content = Pieces()
        self._thoughts = Pieces()
        self.finish_reason: str | None = None
        self._reasoning = reasoning
        self._parser = parser
        self._calls: list[ToolCallDelta] = []

    @property
    def content(self) -> str:
        return str(self._content)

    @property
    def reasoning(self) -> str:
        return str(self._thoughts)

    @property
    def calls(self) -> list[ToolCallDelta]:
        return _one_each(self._calls)

    @property
    def thinking(self) -> bool:
        """Whether nothing but thoughts has come, where they are parted from the text."""
        return self._reasoning is not None and self._reasoning.thinking

    @property
    def reasoning_tokens(self) -> int:
        return self._reasoning.count(self.reasoning) if self._reasoning is not None else 0

    def push(self, output: CompletionOutput) -> ReplyDelta:
        """Take in what is new; returns what of it is certain, with at most one delta per call."""
        thoughts, text = "", output.text
        if self._reasoning is not None:
            thoughts, text = self._reasoning.push(text, output.finished)
        if self._parser is not None:
            delta = self._parsed(self._parser, text, output)
        else:
            delta = ReplyDelta(text)
            self.finish_reason = output.finish_reason
        delta.reasoning = thoughts
        self._content.add(delta.content)
        self._thoughts.add(thoughts)
        return delta

    def _parsed(self, parser: ToolCallParser, text: str, output: CompletionOutput) -> ReplyDelta:
        pieces = [parser.push(text)]
        if output.finished:
            pieces.append(parser.finish(output.finish_reason == "length"))
            lost = [call.arguments for call in parser.reply.invalid if call.name is None]
            # calls that are none: their text is all there is to give
            pieces.append(ReplyDelta("".join(lost)))
            self.finish_reason = parser.reply.finish_reason(output.finish_reason)
        calls = _one_each([call for piece in pieces for call in piece.calls])
        self._calls += calls
        return ReplyDelta("".join(piece.content for piece in pieces), calls)


def _one_each(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """The deltas of each call as one."""
    pieces: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        pieces.setdefault(delta.index, []).append(delta)
    return [
        ToolCallDelta(index, given[0].id, given[0].name, "".join(piece.arguments for piece in given))
        for index, given in pieces.items()
    ]
