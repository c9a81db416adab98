r"""Regular expressions as Python and JSON Schema read them, written for the grammar compiler, whose dialect is Rust's.

``\d``, ``\w`` and ``\s`` allow ASCII only, as ``re.ASCII`` and JSON Schema have it; ``(?u)`` at the start asks for
Unicode. ``\D``, ``\W``, ``\S`` and ``.`` allow what every reading of them allows. What no automaton can hold an
output to (look-ahead, word boundaries, references to groups) is refused by name.
"""

from __future__ import annotations

import re

from paged_backend.constrain.words import Alternatives, Piece, words

_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_CONTROL = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "a": 0x07}
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xu]\{([0-9a-fA-F]{1,6})\}")
_PROPERTY = re.compile(r"[pP](\{\^?[\w=:.\- ]+\}|[A-Z])")
_OCTAL = re.compile(r"0[0-7]{0,2}|[1-3][0-7]{2}")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_FLAGS = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
_GROUPS = {
    "(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind",
    "(?>": "an atomic group", "(?P=": "a reference to a group", "(?(": "a condition on a group",
    "(?P>": "a recursive group", "(?R": "a recursive group", "(?&": "a recursive group",
}  # fmt: skip
_SAMPLES = {"d": "0", "w": "a", "s": " ", "D": "a", "W": "-", "S": "a"}
_META = frozenset(r"\.+*?()|[]{}^$#&-~/")


class RegexError(ValueError):
    """A pattern that cannot be held to; ``construct`` says what in it."""

    def __init__(self, construct: str, pattern: str) -> None:
        super().__init__(
            f"the regex {pattern!r:.120} has {construct}, which a grammar cannot hold an output to"
        )
        self.construct = construct


def to_grammar_regex(pattern: str) -> str:
    """``pattern`` in the grammar compiler's dialect. Raises :class:`RegexError`."""
    return _Translator(pattern).run()


def regex_words(pattern: str, at_least: int = 0, at_most: int | None = None) -> list[str]:
    """Short texts that ``pattern`` (in any dialect) matches as a whole, as good as its structure tells."""
    translator = _Translator(pattern)
    try:
        translator.run()
    except RegexError:
        return []
    return words(translator.regex, at_least, at_most)


class _Translator:
    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0
        self.flags = frozenset[str]()  # of i, s, u, x
        self.outer: list[frozenset[str]] = []  # flags outside of the groups that are open
        self.regex: Alternatives = [[]]
        self.groups = [self.regex]  # those that are open

    def run(self) -> str:
        written = []
        while self.at < len(self.text):
            written.append(self._next())
        return "".join(written)

    def refuse(self, construct: str) -> RegexError:
        return RegexError(construct, self.text)

    def _next(self) -> str:
        char = self.text[self.at]
        if char == "\\":
            return self._escape()
        if char == "[":
            return self._char_class()
        if char == "(":
            return self._group()
        if char == "{":
            return self._count()
        self.at += 1
        if char == ")":
            if not self.outer:
                raise self.refuse("an unopened ')'")
            self.flags = self.outer.pop()
            group = self.groups.pop()
            self._add(group)
            return char
        if char in "*+?":
            self._repeat(int(char == "+"), 1 if char == "?" else None)
            return char + self._laziness()
        if char == ".":
            self._add("a")
            return "(?s:.)" if "s" in self.flags else r"[^\n\r\x{2028}\x{2029}]"
        if "x" in self.flags and (char.isspace() or char == "#"):
            if char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            return ""
        if char == "|":
            self.groups[-1].append([])
        return char if char in "^$|" else self._literal(ord(char))

    def _add(self, node: str | Alternatives) -> None:
        self.groups[-1][-1].append(Piece(node))

    def _repeat(self, least: int, most: int | None) -> None:
        sequence = self.groups[-1][-1]
        if sequence:
            sequence[-1] = Piece([[sequence[-1]]], least, most)

    def _laziness(self) -> str:
        """``?`` after a quantifier changes what is captured, not what matches."""
        following = self.text[self.at : self.at + 1]
        if following == "+":
            raise self.refuse("a possessive quantifier")
        self.at += following == "?"
        return ""

    def _count(self) -> str:
        found = _COUNT.match(self.text, self.at)
        if found is None or found[0] == "{}":
            self.at += 1
            return r"\{"
        self.at = found.end()
        self._repeat(int(found[1] or 0), int(found[3]) if found[3] else None if found[2] else int(found[1]))
        return f"{{{found[1] or 0}{found[2]}{found[3]}}}{self._laziness()}"

    def _group(self) -> str:
        for opening, construct in _GROUPS.items():
            if self.text.startswith(opening, self.at):
                raise self.refuse(construct)
        if self.text.startswith("(?#", self.at):
            end = self.text.find(")", self.at)
            self.at = len(self.text) if end < 0 else end + 1
            return ""
        named = re.compile(r"\(\?P?<\w+>").match(self.text, self.at)
        flagged = _FLAGS.match(self.text, self.at)
        before = self.flags
        if named is not None:
            self.at = named.end()
        elif flagged is not None:
            self.at = flagged.end()
            self._set_flags(flagged[1], flagged[2] or "")
            if flagged[3] == ")":  # from here on
                return ""
        else:
            self.at += 1
        self.outer.append(before)
        self.groups.append([[]])
        return "(?:"

    def _set_flags(self, added: str, removed: str) -> None:
        for flag in added + removed:
            if flag == "m":
                raise self.refuse("the flag m")
            if flag not in "isuxaL":
                raise self.refuse(f"the flag {flag}")
        dropped = set(removed) | ({"u"} if "a" in added else set())
        self.flags = (self.flags | (set(added) & set("isux"))) - dropped

    def _escape(self) -> str:
        char = self.text[self.at + 1 : self.at + 2]
        if char in "bB" and char:
            raise self.refuse("a word boundary")
        if char in "AZz" and char:
            self.at += 2
            return "^" if char == "A" else "$"
        value = self._escaped(in_class=False)
        if isinstance(value, int):
            return self._literal(value)
        self._add(_SAMPLES.get(value[1:], "a"))
        if value[1:] in _ASCII and "u" not in self.flags:
            return f"[{_ASCII[value[1:]]}]"
        return value

    def _escaped(self, in_class: bool) -> int | str:
        """What the escape at this place stands for: a character's number, or a class as the compiler writes it."""
        self.at += 1
        rest = self.text[self.at : self.at + 1]
        if not rest:
            raise self.refuse("a lonely '\\' at its end")
        for form, base in ((_HEX, 16), (_OCTAL, 8)):
            found = form.match(self.text, self.at)
            if found is not None:
                self.at = found.end()
                return int(next(filter(None, found.groups()), "") if base == 16 else found[0], base)
        found = _PROPERTY.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
            return "\\" + found[0]
        self.at += 1
        if rest in "dwsDWS":
            return "\\" + rest
        if rest in _CONTROL:
            return _CONTROL[rest]
        if rest == "b" and in_class:
            return 0x08
        if rest == "c" and self.text[self.at : self.at + 1].isalpha():
            self.at += 1
            return ord(self.text[self.at - 1]) % 32
        if rest.isdigit() or rest in "kg":
            raise self.refuse("a reference to a group")
        if rest.isascii() and rest.isalpha():
            raise self.refuse(f"the escape \\{rest}")
        return ord(rest)

    def _literal(self, code: int) -> str:
        char = chr(code)
        self._add(char)
        if "i" in self.flags and char.isalpha():
            if "u" in self.flags:
                return f"(?i:{char})"
            if char.isascii():
                return f"[{char.upper()}{char.lower()}]"
        return _spelled(code)

    def _char_class(self) -> str:
        self.at += 1
        negated = self.text.startswith("^", self.at)
        self.at += negated
        items: list[str] = []
        spans: list[tuple[int, int]] = []
        samples: list[str] = []
        first = True
        while first or not self.text.startswith("]", self.at):
            if self.at >= len(self.text):
                raise self.refuse("an unclosed '['")
            if _POSIX.match(self.text, self.at):
                raise self.refuse("a POSIX class (write [A-Za-z] for [[:alpha:]])")
            first = False
            low = self._class_item()
            if isinstance(low, str):
                samples.append(_SAMPLES.get(low[1:], "a"))
                items.append(self._class_escape(low, negated))
                continue
            is_range = self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] not in (
                "",
                "]",
            )
            self.at += is_range
            high = self._class_item() if is_range else low
            if isinstance(high, str):
                items += [_spelled(low), r"\-", self._class_escape(high, negated)]
            elif high < low:
                raise self.refuse("a range whose end comes before its start")
            else:
                spans.append((low, high))
                items += self._span(low, high)
        self.at += 1
        self._add(_sample(spans, samples, negated))
        both = "i" in self.flags and "u" in self.flags
        written = f"[{'^' if negated else ''}{''.join(items)}]"
        return f"(?i:{written})" if both else written

    def _class_item(self) -> int | str:
        if self.text[self.at : self.at + 1] == "\\":
            return self._escaped(in_class=True)
        if self.at >= len(self.text):
            raise self.refuse("an unclosed '['")
        self.at += 1
        return ord(self.text[self.at - 1])

    def _class_escape(self, escape: str, negated: bool) -> str:
        """Outside of a negation less is safe, inside of one more is."""
        name = escape[1:]
        if "u" in self.flags or name.lower() not in _ASCII or negated == name.islower():
            return escape
        return f"[^{_ASCII[name.lower()]}]" if negated else _ASCII[name]

    def _span(self, low: int, high: int) -> list[str]:
        spans = [(low, high)]
        if "i" in self.flags and "u" not in self.flags:
            for start, shift in ((ord("a"), -32), (ord("A"), 32)):
                first, last = max(low, start), min(high, start + 25)
                if first <= last:
                    spans.append((first + shift, last + shift))
        return [_spelled(a) if a == b else f"{_spelled(a)}-{_spelled(b)}" for a, b in spans]


def _sample(spans: list[tuple[int, int]], samples: list[str], negated: bool) -> str:
    """A character that a class admits, or would but for its escapes; one that JSON writes as it is, if possible."""
    if negated:
        free = (char for char in "a0A- _.\n" if not any(low <= ord(char) <= high for low, high in spans))
        return next((char for char in free if char not in samples), "é")
    for char in "a0A":
        if any(low <= ord(char) <= high for low, high in spans):
            return char
    return min([*samples, *(chr(low) for low, _ in spans)], key=lambda char: not char.isalnum())


def _spelled(code: int) -> str:
    """A character as a regex of its own, in or outside of a class."""
    char = chr(code)
    if char in _META:
        return "\\" + char
    return char if char.isprintable() and char.isascii() else f"\\x{{{code:X}}}"
