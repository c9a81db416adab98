"""ToolCallParser: a model's text in, in pieces of any size; content, tool calls and their argument deltas out."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from paged_backend.text.pieces import Pieces
from paged_backend.toolcalls.formats import ToolFormat
from paged_backend.toolcalls.scanner import CallScanner

_STRETCH = 4096  # characters that are looked at together


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
    Linear in the length of the text, in pieces of any size.
    """

    def __init__(self, tool_format: ToolFormat) -> None:
        self._reply = ParsedReply()
        self._content_parts = Pieces()
        self._format = tool_format
        self._buffer = ""  # short: what was read of it is cut off, which copies the rest
        self._space = Pieces()  # white space that is content only if more content follows
        self._sought: _Sought | None = None
        self._inside = False  # between the start marker and the end of its calls
        self._at_start = True
        self._scanner: CallScanner | None = None
        self._id = ""
        self._count = 0
        self._announced = False

    def push(self, text: str) -> ReplyDelta:
        """Take in text; returns what is certain with it."""
        delta = ReplyDelta()
        for start in range(0, len(text), _STRETCH):
            self._buffer += text[start : start + _STRETCH]
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
        space = self._space.take()
        if not self._reply.calls and not self._reply.invalid:
            self._emit(delta, space)
        return delta

    @property
    def reply(self) -> ParsedReply:
        """The whole so far."""
        self._reply.content = str(self._content_parts)
        return self._reply

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
                self._space.take()
                return True
            if not head:
                self._space.add(self._buffer)
                self._buffer = ""
                return False
        self._at_start = False
        before, marker, after = self._buffer.partition(self._format.start)
        if marker:
            self._content(delta, before)
            self._space.take()
            self._buffer, self._inside = after, True
            return True
        held = 0 if final else partial(self._buffer, self._format.start)
        cut = len(self._buffer) - held
        self._content(delta, self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        return False

    def _content(self, delta: ReplyDelta, text: str) -> None:
        # white space between a call and the first text after it parts them and is not content
        if not self._content_parts and (self._reply.calls or self._reply.invalid):
            text = text.lstrip()
            self._space.take()
        kept = text.rstrip()
        if kept:
            self._emit(delta, self._space.take() + kept)
        self._space.add(text[len(kept) :])

    def _emit(self, delta: ReplyDelta, text: str) -> None:
        delta.content += text
        self._content_parts.add(text)

    def _between(self, delta: ReplyDelta, final: bool) -> bool:
        """After a start marker, or between the calls that follow it."""
        if self._sought is not None:
            return self._seek(self._sought, final)
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
            self._sought = _Sought("{")  # Mistral's newer form: the name, then the arguments alone
        elif self._format.bare:
            self._inside = False
        else:  # not the JSON that the format asks for: taken as a broken call, up to the end marker
            self._sought = _Sought(self._format.end)
        return True

    def _seek(self, sought: _Sought, final: bool) -> bool:
        """Up to the marker that ends the name of a call, or a broken one."""
        found = sought.push(self._buffer)
        self._buffer = ""
        if not found and not final:
            return False
        self._sought, text = None, sought.before
        if self._format.name == "mistral" and found:
            self._buffer = sought.marker + sought.after
            name = text.partition("[CALL_ID]")[0].replace("[ARGS]", "").strip()
            self._open(CallScanner(self._format.arguments_key, name=name))
            return True
        self._inside = found
        self._buffer = sought.marker + sought.after if found else ""
        problem = "it has no arguments" if self._format.name == "mistral" else "it is not JSON"
        self._reply.invalid.append(InvalidToolCall(self._new_id(), None, text.strip(), problem))
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
            self._reply.invalid.append(InvalidToolCall(self._id, scanner.name, arguments, error))
        else:
            if not scanner.streamed and arguments:
                delta.calls.append(ToolCallDelta(self._count, arguments=arguments))
            self._reply.calls.append(ToolCall(self._id, scanner.name or "", arguments))
        if self._announced:
            self._count += 1

    def _new_id(self) -> str:
        if self._format.name == "mistral":  # its templates take ids of nine letters and digits only
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class _Sought:
    """A marker in text that comes in pieces: what stands ``before`` it and ``after`` it once it was found."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.after = ""
        self._seen = Pieces()
        self._tail = ""  # in which the marker may have begun

    @property
    def before(self) -> str:
        return str(self._seen) + self._tail

    def push(self, text: str) -> bool:
        """Whether the marker has come."""
        text = self._tail + text
        at = text.find(self.marker)
        cut = at if at >= 0 else max(len(text) - len(self.marker) + 1, 0)
        self._seen.add(text[:cut])
        if at >= 0:
            self._tail, self.after = "", text[at + len(self.marker) :]
        else:
            self._tail = text[cut:]
        return at >= 0


def partial(text: str, marker: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``marker``."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
