"""ToolCallParser: a model's text in, in pieces of any size; content, tool calls and their argument deltas out."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from paged_backend.toolcalls.formats import ToolFormat
from paged_backend.toolcalls.scanner import CallScanner


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON text of an object, as the model wrote it."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.arguments)
        return value


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """A call that was cut off or is not valid JSON; ``arguments`` is what there is of it."""

    id: str
    name: str | None
    arguments: str
    error: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call number ``index``. The first has ``id`` and ``name``, later ones only arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ReplyDelta:
    """What one push made certain."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    reasoning: str = ""

    def __bool__(self) -> bool:
        return bool(self.content or self.calls or self.reasoning)


@dataclass(slots=True)
class ParsedReply:
    """A whole reply. ``content`` is the text outside of calls."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    invalid: list[InvalidToolCall] = field(default_factory=list)

    def finish_reason(self, engine_reason: str | None) -> str | None:
        """``tool_calls`` for a reply that ended by itself with at least one whole call, else the engine's reason."""
        return "tool_calls" if engine_reason == "stop" and self.calls else engine_reason


def parse_reply(tool_format: ToolFormat, text: str, truncated: bool = False) -> ParsedReply:
    """Parse a whole reply. truncated: it was cut off, so that an unfinished call is no call."""
    parser = ToolCallParser(tool_format)
    parser.push(text)
    parser.finish(truncated)
    return parser.reply


class ToolCallParser:
    """Feed it text with :meth:`push`, end with :meth:`finish`; ``reply`` then holds the whole.

    White space around calls belongs to neither. Text that may turn out to be the beginning of a call is held back.
    """

    def __init__(self, tool_format: ToolFormat) -> None:
        self.reply = ParsedReply()
        self._format = tool_format
        self._buffer = ""
        self._space = ""  # white space that is content only if more content follows
        self._inside = False  # between the start marker and the end of its calls
        self._at_start = True
        self._scanner: CallScanner | None = None
        self._id = ""
        self._count = 0
        self._announced = False

    def push(self, text: str) -> ReplyDelta:
        """Take in text; returns what is certain with it."""
        delta = ReplyDelta()
        self._buffer += text
        while self._step(delta, final=False):
            pass
        return delta

    def finish(self, truncated: bool = False) -> ReplyDelta:
        """No more text can come. An open call becomes an invalid one, saying whether it was truncated."""
        delta = ReplyDelta()
        while self._step(delta, final=True):
            pass
        if self._scanner is not None:
            self._close(delta, "it was cut off by max_tokens" if truncated else "its JSON does not end")
        if not self.reply.calls and not self.reply.invalid:
            self._emit(delta, self._space)
        self._space = ""
        return delta

    # --- one step of the machine: True if it got anywhere -------------------------------------------------------

    def _step(self, delta: ReplyDelta, final: bool) -> bool:
        if self._scanner is not None:
            return self._scan(delta)
        if self._inside:
            return self._between(delta, final)
        return self._text(delta, final)

    def _text(self, delta: ReplyDelta, final: bool) -> bool:
        if not self._buffer:
            return False
        if self._at_start and self._format.bare:
            head = self._buffer.lstrip()
            if head.startswith("{"):
                self._buffer, self._inside, self._at_start = head, True, False
                return True
            if not head:
                return False
        self._at_start = False
        before, marker, after = self._buffer.partition(self._format.start)
        if marker:
            self._content(delta, before)
            self._space = ""
            self._buffer, self._inside = after, True
            return True
        held = 0 if final else partial(self._buffer, self._format.start)
        cut = len(self._buffer) - held
        self._content(delta, self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        return False

    def _content(self, delta: ReplyDelta, text: str) -> None:
        # white space between a call and the first text after it parts them and is not content
        if not self.reply.content and (self.reply.calls or self.reply.invalid):
            text, self._space = text.lstrip(), ""
        kept = text.rstrip()
        if kept:
            self._emit(delta, self._space + kept)
            self._space = ""
        self._space += text[len(kept) :]

    def _emit(self, delta: ReplyDelta, text: str) -> None:
        delta.content += text
        self.reply.content += text

    def _between(self, delta: ReplyDelta, final: bool) -> bool:
        """After a start marker, or between the calls that follow it."""
        self._buffer = self._buffer.lstrip(" \t\r\n;," if not self._format.end else None)
        head = self._buffer
        if not head:
            return False
        if head[0] == "{":
            self._open(CallScanner(self._format.arguments_key, keep=self._format.bare))
            return True
        for marker in (self._format.start, self._format.end):
            if marker and head.startswith(marker):
                self._buffer, self._inside = head[len(marker) :], marker == self._format.start
                return True
            if marker and not final and marker.startswith(head):
                return False
        if self._format.name == "mistral":
            if head[0] in "[]":
                self._buffer, self._inside = head[1:], head[0] == "["
                return True
            return self._named(final)
        if self._format.bare:
            self._inside = False
            return True
        # not the JSON that the format asks for: taken as a broken call, up to the end marker
        end = head.find(self._format.end)
        if end < 0 and not final:
            return False
        broken = head if end < 0 else head[:end]
        self._buffer = head[len(broken) :]
        self._inside = end >= 0
        self.reply.invalid.append(InvalidToolCall(self._new_id(), None, broken.strip(), "it is not JSON"))
        return True

    def _named(self, final: bool) -> bool:
        """Mistral's newer form: the name, then the arguments alone."""
        brace = self._buffer.find("{")
        if brace < 0:
            if final:
                text, self._buffer, self._inside = self._buffer, "", False
                self.reply.invalid.append(
                    InvalidToolCall(self._new_id(), None, text.strip(), "it has no arguments")
                )
            return False
        name = self._buffer[:brace].partition("[CALL_ID]")[0].replace("[ARGS]", "").strip()
        self._buffer = self._buffer[brace:]
        self._open(CallScanner(self._format.arguments_key, name=name))
        return True

    # --- calls -----------------------------------------------------------------------------------------------------

    def _open(self, scanner: CallScanner) -> None:
        self._scanner, self._announced, self._id = scanner, False, self._new_id()

    def _scan(self, delta: ReplyDelta) -> bool:
        scanner = self._scanner
        if scanner is None or not (self._buffer or scanner.done):
            return False
        self._buffer = self._buffer[scanner.push(self._buffer) :]
        if scanner.rejected:  # JSON, but no call: it was content
            self._buffer = scanner.text + self._buffer
            self._scanner, self._inside = None, False
            return True
        self._pass_on(delta, scanner)
        if scanner.done:
            self._close(delta, "")
            return True
        return False

    def _pass_on(self, delta: ReplyDelta, scanner: CallScanner) -> None:
        if scanner.name is None:
            return
        if not self._announced:
            delta.calls.append(ToolCallDelta(self._count, self._id, scanner.name))
            self._announced = True
        fragment = scanner.take()
        if fragment:
            delta.calls.append(ToolCallDelta(self._count, arguments=fragment))

    def _close(self, delta: ReplyDelta, error: str) -> None:
        scanner, self._scanner = self._scanner, None
        if scanner is None:
            return
        arguments, problem = scanner.result()
        error = error or problem
        if error:
            self.reply.invalid.append(InvalidToolCall(self._id, scanner.name, arguments, error))
        else:
            if not scanner.streamed and arguments:
                delta.calls.append(ToolCallDelta(self._count, arguments=arguments))
            self.reply.calls.append(ToolCall(self._id, scanner.name or "", arguments))
        if self._announced:
            self._count += 1

    def _new_id(self) -> str:
        if self._format.name == "mistral":  # its templates take ids of nine letters and digits only
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def partial(text: str, marker: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``marker``."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
