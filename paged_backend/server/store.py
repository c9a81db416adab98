"""ResponseStore: what the Responses API keeps between requests, in memory and bounded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


class UnknownResponseError(LookupError):
    """There is no such response; ``args[0]`` is its id."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """body: the response as JSON. items: its input items as JSON, those of ``previous`` not among them."""

    id: str
    body: bytes
    items: bytes
    previous: str | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.body) + len(self.items)


class ResponseStore:
    """At most ``most`` responses of ``most_bytes`` together; the least recently used ones go first. 0 keeps none.

    To use a response is to use those it follows, so that no chain loses its beginning before others are gone.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, index: object) -> bool:
        return index in self._kept

    def put(self, response: StoredResponse) -> None:
        if response.id in self._kept:
            self.delete(response.id)
        self._kept[response.id] = response
        self.num_bytes += response.size
        while self._kept and (len(self._kept) > self.most or self.num_bytes > self.most_bytes):
            self.delete(next(iter(self._kept)))

    def get(self, index: str) -> StoredResponse:
        """Raises :class:`UnknownResponseError`."""
        if index not in self._kept:
            raise UnknownResponseError(index)
        return self._kept[index]

    def chain(self, index: str) -> list[StoredResponse]:
        """The conversation that ends with it, oldest first. Raises :class:`UnknownResponseError`."""
        found = [self.get(index)]
        while (previous := found[-1].previous) is not None:
            found.append(self.get(previous))
        found.reverse()
        for response in found:
            self._kept.move_to_end(response.id)
        return found

    def delete(self, index: str) -> None:
        """Raises :class:`UnknownResponseError`."""
        self.num_bytes -= self.get(index).size
        del self._kept[index]
