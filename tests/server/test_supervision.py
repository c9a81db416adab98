"""Client, requests and supervisor against a scripted engine: who is blamed for a crash, and when it gives up."""

from __future__ import annotations

import asyncio

import pytest

from paged_backend.errors import EngineClosedError, RequestFailedError, RequestRejectedError
from paged_backend.outputs import CompletionOutput
from paged_backend.remote.client import EngineClient, QueueFullError
from paged_backend.remote.protocol import output_to_wire, pack, params_from_wire, params_to_wire, unpack
from paged_backend.remote.supervisor import Supervisor
from paged_backend.remote.transports import EngineLostError
from paged_backend.sampling_params import BeamSearch, RequestOutputKind, SamplingParams

STATS = {"num_running": 0, "num_waiting": 0, "num_steps": 0, "health": "ok"}
HELLO = {"max_model_len": 100, "max_num_seqs": 4, "stats": STATS}


class ScriptedTransport:
    """Gives each remote one token per message and dies of prompts with a 13 in them."""

    restartable = True

    def __init__(self, failing_starts: int = 0, poison: int = 13) -> None:
        self.failing_starts = failing_starts
        self.poison = poison
        self.starts = 0
        self.open_requests: dict[int, list[int]] = {}
        self.hung = False

    async def open(self, deliver):
        self.starts += 1
        if 1 < self.starts <= 1 + self.failing_starts:
            raise EngineLostError("no")
        self.deliver, self.gone, self.open_requests = deliver, asyncio.Event(), {}
        return HELLO

    def send(self, message) -> None:
        loop = asyncio.get_running_loop()
        if message["t"] == "ping" and not self.hung:
            busy = {"num_running": len(self.open_requests)}
            loop.call_soon(self.deliver, {"t": "pong", "stats": {**STATS, **busy}})
        elif message["t"] == "submit":
            if self.poison in message["prompt"]:
                self.gone.set()
            elif not self.gone.is_set():
                done = message.get("resume", {0: []})[0]
                self.open_requests[message["id"]] = list(done)
                loop.call_soon(self.deliver, {"t": "accepted", "id": message["id"]})
                loop.call_soon(self.token, message["id"])

    def token(self, number: int, last: bool = False) -> None:
        if self.gone.is_set():
            return
        tokens = self.open_requests[number]
        tokens.append(len(tokens))
        output = CompletionOutput(0, "x", [tokens[-1]], finish_reason="length" if last else None)
        self.deliver(
            {"t": "news", "items": [{"id": number, "outputs": [output_to_wire(output)], "cached": 0}]}
        )

    async def lost(self) -> None:
        await self.gone.wait()

    async def close(self, kill: bool = False) -> None:
        pass


def serve(scenario, transport=None, **options):
    async def main():
        client = EngineClient(max_waiting=10)
        supervisor = Supervisor(transport or ScriptedTransport(), client, interval=0.02, **options)
        await supervisor.start()
        try:
            return await asyncio.wait_for(scenario(client, supervisor, supervisor.transport), 20)
        finally:
            await supervisor.close()

    return asyncio.run(main())


async def finish(client, transport, job):
    for remote in job.requests:
        transport.token(remote.number, last=True)
    return [output.token_ids async for batch in job.news() for _, output in batch]


def test_innocent_requests_survive_the_one_that_kills_the_engine():
    async def scenario(client, supervisor, transport):
        good = [await client.open([[1, 2]], SamplingParams()) for _ in range(5)]
        bad = asyncio.ensure_future(client.open([[13]], SamplingParams()))
        with pytest.raises(RequestFailedError, match="each time"):
            await bad
        while supervisor.state != "ok" or len(transport.open_requests) < 5:
            await asyncio.sleep(0.01)
        results = [await finish(client, transport, job) for job in good]
        for result in results:
            tokens = [token for output in result for token in output]
            assert tokens == list(range(len(tokens)))
        assert supervisor.restarts == 3
        assert client.in_flight == 0
        assert await finish(client, transport, await client.open([[3]], SamplingParams()))

    serve(scenario)


def test_it_tries_again_after_failed_starts_and_gives_up_in_the_end():
    async def recovers(client, supervisor, transport):
        job = await client.open([[1]], SamplingParams())
        transport.gone.set()
        while supervisor.restarts == 0:
            await asyncio.sleep(0.01)
        assert transport.starts == 3
        await asyncio.sleep(0.02)
        assert await finish(client, transport, job) == [[0, 1, 2]]

    serve(recovers, ScriptedTransport(failing_starts=1))
    told = []

    async def gives_up(client, supervisor, transport):
        job = await client.open([[1]], SamplingParams())
        transport.gone.set()
        with pytest.raises(EngineClosedError, match="gone"):
            _ = [batch async for batch in job.news()]
        assert supervisor.state == "failed"
        with pytest.raises(EngineClosedError):
            await client.open([[1]], SamplingParams())

    serve(gives_up, ScriptedTransport(failing_starts=9), max_restarts=2, on_failed=lambda: told.append(1))
    assert told == [1]


def test_a_hung_engine_is_replaced_an_idle_one_is_not():
    async def scenario(client, supervisor, transport):
        await asyncio.sleep(0.5)
        assert transport.starts == 1  # idle: no steps, no complaint
        job = await client.open([[1]], SamplingParams())
        while transport.starts == 1:  # busy, and no step is ever finished
            await asyncio.sleep(0.01)
        transport.hung = True
        while transport.starts == 2:
            await asyncio.sleep(0.01)
        transport.hung = False
        await asyncio.sleep(0.02)
        return await finish(client, transport, job)

    assert serve(scenario, stall_timeout=0.2) == [[0, 1, 2, 3]]


def test_an_engine_in_this_process_that_hangs_is_reported():
    async def scenario(client, supervisor, transport):
        transport.restartable = False
        job = await client.open([[1]], SamplingParams())
        while supervisor.state != "stalled":
            await asyncio.sleep(0.01)
        transport.gone.set()
        with pytest.raises(EngineClosedError):
            _ = [batch async for batch in job.news()]

    serve(scenario, stall_timeout=0.1)


def test_the_door_counts_sequences():
    async def scenario(client, supervisor, transport):
        jobs = [await client.open([[1], [2]], SamplingParams(n=1)) for _ in range(7)]
        with pytest.raises(QueueFullError) as caught:
            await client.open([[1]], SamplingParams())
        assert caught.value.retry_after >= 1
        with pytest.raises(RequestRejectedError, match="at most 14"):
            await client.open([[1]] * 15, SamplingParams())
        with jobs[0]:
            pass  # left: aborted
        assert client.in_flight == 12
        await client.open([[1]], SamplingParams())

    serve(scenario)


def test_params_cross_the_line_unchanged():
    params = SamplingParams(
        n=2, temperature=0.5, top_p=0.9, stop=["a", "b"], logit_bias={5: -3.5}, allowed_token_ids=[1, 2], seed=-4,
        structured_outputs={"json": {"type": "object"}}, output_kind=RequestOutputKind.DELTA, bad_words=["x"],
    )  # fmt: skip
    wire = params_to_wire(params)
    assert params_to_wire(params_from_wire(unpack(pack(wire)[4:]))) == wire
    assert set(wire) == {
        "n", "temperature", "top_p", "stop", "logit_bias", "allowed_token_ids", "seed", "structured_outputs",
        "output_kind", "bad_words",
    }  # fmt: skip
    beams = SamplingParams(temperature=0, beam_search=BeamSearch(4, early_stopping="never"))
    assert params_from_wire(unpack(pack(params_to_wire(beams))[4:])) == beams
    assert params_to_wire(SamplingParams()) == {}
    with pytest.raises(ValueError, match="logits_processors"):
        params_to_wire(SamplingParams(logits_processors=[lambda a, b, c: c]))


def test_bytes_of_parts_of_characters_cross_to_another_process():
    from paged_backend.outputs import Logprob
    from paged_backend.remote.protocol import output_from_wire

    entry = {7: Logprob(-1.0, 2, "\ufffd", b"\xf0\x9f"), 5: Logprob(-0.5, 1, "a")}
    wire = unpack(pack({"o": output_to_wire(CompletionOutput(0, "", [7], logprobs=[entry]))})[4:])
    found = output_from_wire(wire["o"]).logprobs[0]
    assert found == entry
    assert [item.token_bytes for item in found.values()] == [b"\xf0\x9f", None]
