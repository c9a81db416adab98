"""A load on a server from another process: streams, disconnects, bad bodies, oversized prompts, abandoned readers.

``python tests/server/load.py URL SECONDS [STREAMS]`` prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "box",
    "quietly",
    "and",
    "nobody",
    "minds",
    "at",
    "all",
]
BAD = [
    b"{", b"[]", b'{"messages": 1}', b'{"messages": [], "x": 1}', b"\xff\xff", b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": -1}', b"[" * 5000,
]  # fmt: skip


@dataclass
class Seen:
    """gaps: seconds between two chunks with tokens of one stream. statuses: answers by kind and HTTP status."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    statuses: collections.Counter = field(default_factory=collections.Counter)
    broken: list[str] = field(default_factory=list)
    tokens: int = 0

    def summary(self) -> dict:
        gaps = sorted(self.gaps) or [0.0]
        median = statistics.median(gaps)
        p99 = gaps[int(len(gaps) * 0.99)]
        return {
            "statuses": {
                f"{kind} {status}": count for (kind, status), count in sorted(self.statuses.items())
            },
            "tokens": self.tokens,
            "gap_median_ms": round(median * 1000, 1),
            "gap_p99_ms": round(p99 * 1000, 1),
            "gap_max_ms": round(gaps[-1] * 1000, 1),
            "ratio": round(p99 / median, 2) if median else None,
            "first_token_median_ms": round(statistics.median(self.first or [0.0]) * 1000, 1),
            "broken": self.broken[:10],
        }


class Load:
    def __init__(self, url: str, rng: random.Random) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname, parts.port
        self.rng = rng
        self.seen = Seen()
        self.abandoned: list[asyncio.StreamWriter] = []

    async def request(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer

    def body(self, **extra) -> bytes:
        text = " ".join(self.rng.choices(WORDS, k=self.rng.randint(3, 120)))
        options = {
            "max_tokens": self.rng.randint(20, 160),
            "temperature": 0.8,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,  # a chunk for each step, also where a token completes no character
        }
        return json.dumps({"messages": [{"role": "user", "content": text}], **options, **extra}).encode()

    async def one(self) -> None:
        kind = self.rng.choices(
            ["stream", "leave", "bad", "oversized", "abandon", "whole"], [70, 12, 6, 4, 3, 5]
        )[0]
        if kind == "bad":
            await self.whole(kind, self.rng.choice(BAD))
        elif kind == "oversized":
            await self.whole(kind, self.body(messages=[{"role": "user", "content": "word " * 20_000}]))
        elif kind == "whole":
            await self.whole(kind, self.body(stream=False))
        elif kind == "abandon":
            _, writer = await self.request(self.body(logprobs=True, top_logprobs=20))
            self.abandoned.append(writer)
            if len(self.abandoned) > 8:
                self.abandoned.pop(0).transport.abort()
        else:
            await self.stream(kind)

    async def whole(self, kind: str, body: bytes) -> None:
        reader, writer = await self.request(body)
        answer = await asyncio.wait_for(reader.read(), 300)
        self.seen.statuses[kind, int(answer.split(b" ", 2)[1])] += 1
        writer.close()

    async def stream(self, kind: str) -> None:
        leave_after = self.rng.randint(0, 30) if kind == "leave" else None
        begun, last, count, done = time.monotonic(), None, 0, False
        reader, writer = await self.request(self.body())
        status = int((await asyncio.wait_for(reader.readline(), 300)).split(b" ")[1])
        while leave_after is None or count < leave_after:
            line = await asyncio.wait_for(reader.readline(), 300)
            if not line:
                break
            if line.startswith(b'data: {"id"') and b'"token_ids":[' in line:
                now = time.monotonic()
                (self.seen.first if last is None else self.seen.gaps).append(
                    now - (begun if last is None else last)
                )
                last, count = now, count + 1
                self.seen.tokens += line[line.index(b'"token_ids":[') :].split(b"]")[0].count(b",") + 1
            elif line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b'data: {"error"'):
                self.seen.broken.append(line.decode())
        self.seen.statuses[kind, status] += 1
        if kind == "stream" and status == 200 and not done:
            self.seen.broken.append(f"a stream ended after {count} tokens")
        writer.transport.abort() if kind == "leave" else writer.close()

    async def worker(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                await self.one()
            except (OSError, asyncio.TimeoutError, IndexError, ValueError) as error:
                self.seen.broken.append(repr(error))

    async def run(self, seconds: float, streams: int) -> Seen:
        until = time.monotonic() + seconds
        await asyncio.gather(*[self.worker(until) for _ in range(streams)])
        for writer in self.abandoned:
            writer.transport.abort()
        return self.seen


if __name__ == "__main__":
    url, seconds = sys.argv[1], float(sys.argv[2])
    load = Load(url, random.Random(0))
    found = asyncio.run(load.run(seconds, int(sys.argv[3]) if len(sys.argv) > 3 else 64))
    print(json.dumps(found.summary(), indent=1))
