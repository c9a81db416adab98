"""Talk to ``paged-backend serve`` with OpenAI's own client: an answer, a stream, a JSON object, a tool call.

    python examples/openai_client.py                       # starts a server on the demo model for itself
    python examples/openai_client.py http://127.0.0.1:8000/v1

Needs: pip install 'paged-backend[server]'
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

try:
    import openai
except ImportError as error:
    raise ImportError("the server and this client need: pip install 'paged-backend[server]'") from error
from pydantic import BaseModel


class Animal(BaseModel):
    name: str
    legs: int


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@contextlib.contextmanager
def demo_server() -> Iterator[str]:
    """The address of a server on the demo model, which ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    options = ["--port", str(port), "--max-model-len", "2048"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "paged_backend", "serve", "demo", *options], stderr=log
        )
        try:
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
            ready = False
            while not ready:
                if server.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"the server did not start:\n{log.read()}")
                with contextlib.suppress(openai.APIConnectionError):
                    ready = bool(client.models.list().data)
                time.sleep(0.1)
            yield url
        finally:
            server.terminate()
            server.wait()


def show(url: str) -> None:
    """The four kinds of request."""
    client = openai.OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id

    question = [{"role": "user", "content": "Name three colours."}]
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=40, temperature=0)
    print("answer:", answer.choices[0].message.content)

    print("stream: ", end="")
    for chunk in client.chat.completions.create(
        model=model, messages=question, max_tokens=40, seed=1, stream=True
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    parsed = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Describe a spider."}],
        response_format=Animal,
        max_tokens=60,
    )
    print("object:", parsed.choices[0].message.parsed)

    called = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=60,
        temperature=0,
    )
    for call in called.choices[0].message.tool_calls or ():
        print("call:", call.function.name, json.loads(call.function.arguments))


def main() -> None:
    if len(sys.argv) > 1:
        show(sys.argv[1])
        return
    with demo_server() as url:
        show(url)


if __name__ == "__main__":
    main()
