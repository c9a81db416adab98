"""The engine's process dies, hangs or cannot start; clients see a pause and exactly what they would have seen."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import openai
import pytest

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]


def requests(count: int) -> list[dict]:
    """Greedy and seeded ones, with everything that has a memory: penalties, stops, min_tokens, logprobs, n."""
    made = []
    for i in range(count):
        body: dict = {
            "model": "m",
            "messages": [{"role": "user", "content": " ".join(WORDS[: 1 + i % 9]) + str(i)}],
            "max_tokens": 120 + 5 * (i % 7),
            "seed": i,
            "temperature": 0 if i % 3 == 0 else 0.9,
        }
        extra: dict = {"ignore_eos": i % 2 == 0, "return_token_ids": True}
        if i % 4 == 1:
            body.update(frequency_penalty=0.6, presence_penalty=0.3)
            extra["repetition_penalty"] = 1.2
        if i % 5 == 2:
            body["stop"] = ["qz", "th"]
            extra["min_tokens"] = 60
        if i % 6 == 3:
            body.update(logprobs=True, top_logprobs=2)
        if i % 7 == 4 and body["temperature"]:
            body["n"] = 3
        made.append({**body, "extra_body": extra})
    return made


async def stream(client: openai.AsyncOpenAI, body: dict) -> list:
    """[text, tokens, logprobs, finish reason] per choice."""
    choices = [["", [], [], None] for _ in range(body.get("n", 1))]
    async for chunk in await client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            found = choices[choice.index]
            found[0] += choice.delta.content or ""
            found[1] += getattr(choice, "token_ids", None) or []
            found[2] += [
                (item.token, item.logprob) for item in (choice.logprobs.content if choice.logprobs else [])
            ]
            found[3] = choice.finish_reason or found[3]
    return choices


@pytest.fixture(scope="module")
def process_server(start):
    with start(in_process=False, served_model_names=("m",), stall_timeout=10.0) as server:
        server.serving.supervisor._interval = 0.2
        yield server


def engine_pid(server) -> int:
    return server.serving.supervisor.transport.pid


def strike(server, blow: signal.Signals, streams: int, tokens: int) -> None:
    """Send ``blow`` to the engine as soon as that many streams have got that many tokens each.

    Those that have ended count as well: on a slow machine the first may be over before the last has come.
    """
    client, receive = server.serving.client, server.serving.client.receive
    begun: set[int] = set()

    def watch(message) -> None:
        receive(message)
        begun.update(key for key, remote in client._requests.items() if remote.num_output_tokens >= tokens)
        if len(begun) >= streams:
            del client.receive
            os.kill(engine_pid(server), blow)

    client.receive = watch


def run_all(server, bodies) -> list:
    async def main():
        async with server.async_client(timeout=120) as client:
            return await asyncio.gather(*[stream(client, body) for body in bodies])

    return asyncio.run(main())


def test_kill_9_during_32_streams_changes_no_token(process_server, until):
    server = process_server
    bodies = [{**body, "max_tokens": body["max_tokens"] + 150} for body in requests(32)]
    undisturbed = run_all(server, bodies)
    before, pid = server.serving.supervisor.restarts, engine_pid(server)
    strike(server, signal.SIGKILL, 32, 5)
    assert run_all(server, bodies) == undisturbed
    assert server.serving.supervisor.restarts == before + 1
    assert engine_pid(server) != pid
    until(lambda: server.idle)
    assert server.get("/health").status_code == 200


@pytest.mark.slow
def test_a_second_and_third_kill_while_it_recovers(process_server, until):
    server = process_server
    bodies = [{**body, "max_tokens": 400} for body in requests(8)]
    undisturbed = run_all(server, bodies)
    before = server.serving.supervisor.restarts

    def again(restarts: int) -> bool:
        return server.serving.supervisor.restarts == restarts and server.serving.supervisor.state == "ok"

    def keep_striking() -> None:
        strike(server, signal.SIGKILL, 4, 20)
        until(lambda: again(before + 1), 60)
        strike(server, signal.SIGKILL, 1, 60)

    thread = threading.Thread(target=keep_striking)
    thread.start()
    assert run_all(server, bodies) == undisturbed
    thread.join()
    assert server.serving.supervisor.restarts == before + 2
    until(lambda: server.idle)


@pytest.mark.slow
def test_an_engine_that_stalls_is_replaced(process_server, until):
    server = process_server
    bodies = [{**body, "max_tokens": 400} for body in requests(6)]
    undisturbed = run_all(server, bodies)
    before = server.serving.supervisor.restarts
    strike(server, signal.SIGSTOP, 4, 10)
    assert run_all(server, bodies) == undisturbed
    assert server.serving.supervisor.restarts == before + 1
    until(lambda: server.idle)


@pytest.mark.slow
def test_whole_answers_and_new_requests_survive_too(process_server, until):
    server = process_server

    async def main():
        async with server.async_client(timeout=120) as client:
            bodies = [{**body, "max_tokens": 400} for body in requests(4)]
            expected = [await client.chat.completions.create(**body) for body in bodies]
            strike(server, signal.SIGKILL, 3, 10)
            tasks = [asyncio.ensure_future(client.chat.completions.create(**body)) for body in bodies]
            while server.serving.supervisor.state == "ok":
                await asyncio.sleep(0.002)
            assert server.serving.health == "restarting"
            late = await client.chat.completions.create(**bodies[0])  # sent while there is no engine
            return expected, await asyncio.gather(*tasks), late

    expected, found, late = asyncio.run(main())
    assert [a.choices for a in found] == [a.choices for a in expected]
    assert [a.usage.completion_tokens for a in found] == [a.usage.completion_tokens for a in expected]
    assert late.choices == expected[0].choices
    until(lambda: server.idle)


@pytest.mark.slow
def test_prompt_logprobs_and_echo_survive(process_server):
    server = process_server

    async def main():
        async with server.async_client(timeout=120) as client:
            options = {"model": "m", "prompt": ["the fox", "a dog"], "echo": True, "logprobs": 2, "seed": 3}
            extra = {"ignore_eos": True}
            return (await client.completions.create(**options, max_tokens=300, extra_body=extra)).choices

    undisturbed = asyncio.run(main())
    strike(server, signal.SIGKILL, 2, 10)
    assert asyncio.run(main()) == undisturbed


@pytest.mark.slow
def test_a_model_that_cannot_be_opened_ends_the_start_with_its_reason(tmp_path):
    from paged_backend.config import EngineConfig
    from paged_backend.errors import ModelLoadError
    from paged_backend.remote.transports import ProcessTransport

    async def main() -> None:
        transport = ProcessTransport(EngineConfig(str(tmp_path / "nothing.gguf")))
        try:
            await transport.open(lambda message: None)
        finally:
            await transport.close()

    with pytest.raises(ModelLoadError, match="nothing"):
        asyncio.run(main())


def test_an_engine_process_that_dies_at_its_start_is_an_error():
    from paged_backend.config import EngineConfig
    from paged_backend.remote.transports import EngineLostError, ProcessTransport

    async def main() -> None:
        transport = ProcessTransport(EngineConfig("x"), (sys.executable, "-c", "import sys; sys.exit(3)"))
        try:
            await transport.open(lambda message: None)
        finally:
            await transport.close()

    with pytest.raises(EngineLostError, match="status 3"):
        asyncio.run(main())
