"""Clients that go away, or do not read: nothing of theirs stays, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading

import pytest

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000, "ignore_eos": True, "seed": 1}


def raw_request(server, body) -> socket.socket:
    """A connection on which a request was sent and nothing has been read."""
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_aborted_within_a_step(start, until, stream):
    # vllm #9428, #54947; sglang #18701
    with start() as server, server.hold() as gate:
        stats = server.engine.stats
        connection = raw_request(server, {**BODY, "stream": stream})
        until(lambda: stats().num_running == 1)
        gate.allow(3)
        until(lambda: stats().num_steps == 3)
        connection.close()
        until(lambda: server.serving.client.in_flight == 0)
        gate.allow()  # the step that was being computed; there is none after it
        until(lambda: stats().num_running == 0)
        assert stats().kv_blocks_used == 0
        assert stats().num_steps == 4


def test_a_client_that_goes_away_while_it_waits_in_the_queue(start, until):
    with start({"max_num_seqs": 1}) as server, server.hold() as gate:
        first = raw_request(server, BODY)
        until(lambda: server.serving.client.in_flight == 1)
        waiting = [raw_request(server, {**BODY, "stream": i % 2 == 0}) for i in range(6)]
        until(lambda: server.serving.client.in_flight == 7)
        for connection in waiting:
            connection.close()
        until(lambda: server.serving.client.in_flight == 1)
        first.close()
        until(lambda: server.serving.client.in_flight == 0)
        gate.open()
        until(lambda: server.idle)


def test_many_random_disconnects_leave_nothing_and_change_nothing(start, until):
    rng = random.Random(1)
    with start() as server:
        body = {**BODY, "max_tokens": 200}
        alone = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        texts: list[str] = []

        def stay() -> None:
            texts.append(server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])

        threads = [threading.Thread(target=stay) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            mine = {**BODY, "stream": rng.random() < 0.5, "n": rng.choice([1, 3]), "seed": rng.randrange(100)}
            connection = raw_request(server, mine)
            if rng.random() < 0.7:
                connection.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    connection.recv(rng.randrange(1, 4000))
            if rng.random() < 0.5:  # a reset instead of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        for thread in threads:
            thread.join(60)
        assert texts == [alone] * 4
        until(lambda: server.idle)
        server.engine.check()


def test_a_reader_that_stops_reading_is_dropped(start, until):
    with start(slow_reader_timeout=0.3) as server:
        # answers large enough to fill every buffer between here and there
        body = {**BODY, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 8, "max_tokens": 950}
        connection = raw_request(server, body)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        until(lambda: server.serving.client.in_flight == 1)
        until(lambda: server.serving.client.in_flight == 0, 120)
        until(lambda: not server.server.server_state.connections, 60)
        connection.close()
        until(lambda: server.idle)
