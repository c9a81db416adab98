"""The engine's process dies, hangs or cannot start; clients see a pause and exactly what they would have seen."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import openai
import pytest

WORDS = "the quick brown fox jumps over the lazy dog".split()


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


async def stream(client: openai.AsyncOpenAI, body: dict, progress: list[int]) -> list:
    """[text, tokens, logprobs, finish reason] per choice."""
    choices = [["", [], [], None] for _ in range(body.get("n", 1))]
    async for chunk in await client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            found = choices[choice.index]
            found[0] += choice.delta.content or ""
            found[1] += getattr(choice, "token_ids", None) or []
            found[2] += [(item.token, item.logprob) for item in (choice.logprobs.content if choice.logprobs else [])]
            found[3] = choice.finish_reason or found[3]
            progress[0] += 1
    return choices


@pytest.fixture(scope="module")
def process_server(start):
    with start(in_process=False, served_model_names=("m",), stall_timeout=2.0) as server:
        server.serving.supervisor._interval = 0.2
        yield server


def engine_pid(server) -> int:
    return server.serving.supervisor.link.pid


def run_all(server, bodies, disturb=None):
    async def main():
        progress = [0]
        async with server.async_client(timeout=120) as client:
            tasks = [asyncio.ensure_future(stream(client, body, progress)) for body in bodies]
            for after, action in disturb or ():
                while progress[0] < after and not all(task.done() for task in tasks):
                    await asyncio.sleep(0.002)
                action()
            return await asyncio.gather(*tasks)

    return asyncio.run(main())


def test_kill_9_during_32_streams_changes_no_token(process_server, until):
    server = process_server
    bodies = requests(32)
    undisturbed = run_all(server, bodies)
    before, pid = server.serving.supervisor.restarts, engine_pid(server)

    def kill() -> None:
        assert server.serving.client.in_flight > 20
        os.kill(engine_pid(server), signal.SIGKILL)

    assert run_all(server, bodies, [(400, kill)]) == undisturbed
    assert server.serving.supervisor.restarts == before + 1
    assert engine_pid(server) != pid
    until(lambda: server.idle)
    assert server.get("/health").status_code == 200


@pytest.mark.slow
def test_an_engine_that_stalls_is_replaced(process_server, until):
    server = process_server
    bodies = [{**body, "max_tokens": 900} for body in requests(6)]
    undisturbed = run_all(server, bodies)
    before = server.serving.supervisor.restarts
    stop = lambda: os.kill(engine_pid(server), signal.SIGSTOP)  # noqa: E731
    assert run_all(server, bodies, [(60, stop)]) == undisturbed
    assert server.serving.supervisor.restarts == before + 1
    until(lambda: server.idle)


@pytest.mark.slow
def test_whole_answers_and_new_requests_survive_too(process_server, until):
    server = process_server

    async def main():
        async with server.async_client(timeout=120) as client:
            bodies = [{**body, "max_tokens": 400} for body in requests(4)]
            expected = [await client.chat.completions.create(**body) for body in bodies]
            tasks = [asyncio.ensure_future(client.chat.completions.create(**body)) for body in bodies]
            while not server.serving.client.num_output_tokens or server.serving.client.in_flight < 4:
                await asyncio.sleep(0.002)
            os.kill(engine_pid(server), signal.SIGKILL)
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

    async def main(kill: bool):
        async with server.async_client(timeout=120) as client:
            body = dict(model="m", prompt=["the fox", "a dog"], echo=True, logprobs=2, max_tokens=300, seed=3)
            task = asyncio.ensure_future(client.completions.create(**body, extra_body={"ignore_eos": True}))
            if kill:
                start = server.serving.client.num_output_tokens
                while server.serving.client.num_output_tokens < start + 40:
                    await asyncio.sleep(0.001)
                os.kill(engine_pid(server), signal.SIGKILL)
            return (await task).choices

    assert asyncio.run(main(True)) == asyncio.run(main(False))


@pytest.mark.slow
def test_a_model_that_cannot_be_opened_ends_the_start_with_its_reason(tmp_path):
    from paged_backend.config import EngineConfig
    from paged_backend.errors import ModelLoadError
    from paged_backend.server.links import ProcessLink

    async def main() -> None:
        link = ProcessLink(EngineConfig(str(tmp_path / "nothing.gguf")))
        try:
            await link.open(lambda message: None)
        finally:
            await link.close()

    with pytest.raises(ModelLoadError, match="nothing"):
        asyncio.run(main())


def test_an_engine_process_that_dies_at_its_start_is_an_error():
    from paged_backend.config import EngineConfig
    from paged_backend.server.links import EngineLostError, ProcessLink

    async def main() -> None:
        link = ProcessLink(EngineConfig("x"), (sys.executable, "-c", "import sys; sys.exit(3)"))
        try:
            await link.open(lambda message: None)
        finally:
            await link.close()

    with pytest.raises(EngineLostError, match="status 3"):
        asyncio.run(main())
