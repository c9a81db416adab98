"""WaitingQueue: the requests that wait, oldest first. Nothing in a step costs time for each of them.

New requests wait here, and preempted ones, which may still hold blocks; these are also kept in a list of their own.

A request that higher priorities keep overtaking moves to the front in the end. Only the one that has waited longest is
watched: how often those behind it were overtaken is known as soon as one of them has waited longest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import heappop, heappush

from paged_backend.engine.request import Request, Status

PROMOTED = -(1 << 62)
"""The priority of a request that was overtaken too often."""


class WaitingQueue:
    """max_overtakes: how many later requests of higher priority may be admitted before one that waits."""

    def __init__(self, max_overtakes: int) -> None:
        self.max_overtakes = max_overtakes
        self.holders: list[Request] = []
        """Those that hold blocks, oldest first."""
        self._requests: list[Request] = []
        self._by_arrival: list[
            tuple[int, int, Request]
        ] = []  # a heap; who has left goes when it gets to the top
        self._overtakers: list[
            tuple[int, int]
        ] = []  # (arrival, priority) of admitted ones, see ``overtaken_by``

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        """The oldest is 0."""
        return self._requests[index]

    def add(self, request: Request) -> None:
        insert(self._requests, request)
        heappush(self._by_arrival, (request.arrival, request.sequence, request))
        self.note_blocks(request)

    def remove(self, request: Request) -> None:
        remove(self._requests, request)
        if holds(self.holders, request):
            remove(self.holders, request)

    def note_blocks(self, request: Request) -> None:
        """Whether ``request``, which waits, holds blocks may have changed."""
        if bool(len(request.table)) != holds(self.holders, request):
            (insert if len(request.table) else remove)(self.holders, request)

    def overtaken_by(self, admitted: Request) -> Request | None:
        """``admitted`` goes before those that wait. Returns one that has been overtaken too often with that."""
        heap = self._by_arrival
        while heap and heap[0][2].status in (Status.RUNNING, Status.FINISHED):
            heappop(heap)
        if not heap:
            self._overtakers.clear()
            return None
        longest = heap[0][2]
        if admitted.arrival > longest.arrival:
            insort(self._overtakers, (admitted.arrival, admitted.priority))
        # arrived before the one that waits longest now: these have overtaken nobody who is still here
        del self._overtakers[: bisect_right(self._overtakers, longest.arrival, key=lambda pair: pair[0])]
        if sum(priority < longest.priority for _, priority in self._overtakers) < self.max_overtakes:
            return None
        return longest

    def promote(self, request: Request) -> None:
        """Put all that waits of ``request`` before everybody else."""
        first = bisect_left(self._requests, (request.priority, request.arrival, 0), key=_order)
        last = bisect_left(self._requests, (request.priority, request.arrival + 1, 0), key=_order)
        for sequence in self._requests[first:last]:
            self.remove(sequence)
            sequence.priority = PROMOTED
            insert(self._requests, sequence)
            self.note_blocks(sequence)


def insert(requests: list[Request], request: Request) -> None:
    """Into a list that is sorted by order."""
    insort(requests, request, key=_order)


def remove(requests: list[Request], request: Request) -> None:
    """From a list that is sorted by order; ValueError if it is not in there."""
    if not holds(requests, request):
        raise ValueError(f"request {request.request_id} is not in the queue")
    del requests[bisect_left(requests, request.order, key=_order)]


def holds(requests: list[Request], request: Request) -> bool:
    """Whether a list that is sorted by order has ``request``."""
    index = bisect_left(requests, request.order, key=_order)
    return index < len(requests) and requests[index] is request


def _order(request: Request) -> tuple[int, int, int]:
    return request.order
