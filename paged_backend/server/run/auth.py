"""API keys, compared in constant time; and where a server gets them from."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

KEY_VARIABLE = "PAGED_BACKEND_API_KEY"


class ApiKeys:
    """Any of several keys. With none, everything is let in."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admits(self, authorization: str | None, key: str | None = None) -> bool:
        """Whether the value of an Authorization header, or of x-api-key, names one of the keys.

        ``Bearer KEY`` as clients of OpenAI's API send it, or ``Basic`` with the key as the password, as browsers do.
        key: as clients of Anthropic's API send it.
        """
        if not self._digests:
            return True
        given = [_digest(_key_in(authorization or "")), _digest((key or "").strip())]
        # all of them are compared, whichever matches: the time taken tells nothing
        return sum(hmac.compare_digest(one, known) for one in given for known in self._digests) > 0


def _key_in(authorization: str) -> str:
    scheme, _, rest = authorization.partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer":
        return rest
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def collect_keys(
    given: Sequence[str], file: Path | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Keys from flags, a file with one a line (# begins a comment), and ``PAGED_BACKEND_API_KEY`` (commas between)."""
    keys = [*given, *environment.get(KEY_VARIABLE, "").split(",")]
    if file is not None:
        found = [
            line.strip() for line in file.read_text("utf-8").splitlines() if not line.lstrip().startswith("#")
        ]
        if not any(found):
            raise ValueError(f"{file} has no API key; an empty file would open the server to everybody")
        keys += found
    return tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))
