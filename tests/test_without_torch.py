"""Everything but transformers' modules, its adapter and GPUs runs where torch and transformers are not installed.

Each test runs a process of its own in which Python does not find them, nor do the processes that it starts.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from demo_model import needs_demo

HIDING = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_spec(name, *rest):
    return None if name.partition(".")[0] in ("torch", "transformers", "triton") else find(name, *rest)

PathFinder.find_spec = find_spec
"""
OPTIONS = ["--kernels", "reference", "--num-blocks", "64", "--max-model-len", "512"]


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hiding")
    (folder / "sitecustomize.py").write_text(HIDING, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def python(environment):
    """``python(arguments..., fails=False)`` -> what the process says: on stdout, or if it is to fail on stderr."""

    def call(*arguments: str, fails: bool = False) -> str:
        done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
        assert (done.returncode != 0) == fails, done.stderr
        return (done.stderr if fails else done.stdout).strip()

    return call


def test_they_are_not_found_there(python):
    assert "No module named 'torch'" in python("-c", "import torch", fails=True)


def test_run_answers(python, tiny_model):
    options = [*OPTIONS, "--temperature", "0", "--max-tokens", "4", "--ignore-eos"]
    record = json.loads(python("-m", "paged_backend", "run", tiny_model, "the quick", *options))
    assert record["usage"]["completion_tokens"] == 4


def test_bench_measures(python, tiny_model):
    options = ["--requests", "1", "--repeats", "1", "--prompt", "8", "--output", "4", *OPTIONS]
    assert "tokens per second" in python("-m", "paged_backend", "bench", "latency", tiny_model, *options)


def test_doctor_names_the_extra_and_finds_nothing_wrong(python):
    report = json.loads(python("-m", "paged_backend", "doctor", "--json"))
    assert report["problems"] == []
    assert (
        report["extras"]["huggingface"] == {"torch": None, "transformers": None}
        or report["threads"]["torch"] is None
    )
    assert report["gpu"] == {"available": False}


@pytest.mark.parametrize("options", [[], ["--in-process"]])
def test_serve_answers_a_chat(environment, tiny_model, options):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["serve", tiny_model, "--port", str(port), *OPTIONS, *options]
    body = {"model": tiny_model, "messages": [{"role": "user", "content": "the fox"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with subprocess.Popen([sys.executable, "-m", "paged_backend", *command], env=environment) as process:
        try:
            answer = None
            while answer is None:
                assert process.poll() is None
                try:
                    with urllib.request.urlopen(request, timeout=60) as response:
                        answer = json.load(response)
                except urllib.error.HTTPError:
                    raise
                except urllib.error.URLError:  # not listening yet
                    time.sleep(0.05)
            assert answer["usage"]["completion_tokens"] in range(1, 5)
        finally:
            process.kill()


GENERATES = """
import sys
from paged_backend.adapters.{package} import {name}
options = {{"kernels": "reference", "num_blocks": 64, "max_model_len": 512}}
llm = {name}(model={model!r}, max_tokens=4, engine_options=options)
print(type(llm.{call}("the quick brown fox")).__name__)
assert not {{"torch", "transformers"}} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("package", "requirement", "name", "call", "answer"),
    [
        ("langchain", "langchain_core", "ChatPaged", "invoke", "AIMessage"),
        ("langchain", "langchain_core", "PagedLLM", "invoke", "str"),
        ("llama_index", "llama_index", "PagedLLM", "complete", "CompletionResponse"),
    ],
)
def test_a_framework_generates(python, tiny_model, package, requirement, name, call, answer):
    pytest.importorskip(requirement)
    code = GENERATES.format(package=package, name=name, call=call, model=tiny_model)
    assert python("-c", code) == answer


def test_templates_tools_and_grammars_work(python, tiny_model):
    code = f"""
from paged_backend import LLM, SamplingParams, StructuredOutputs
tool = {{"type": "function", "function": {{"name": "fox", "parameters": {{"type": "object", "properties": {{}}}}}}}}
with LLM({tiny_model!r}, kernels="reference", num_blocks=64, max_model_len=512) as llm:
    messages = [{{"role": "user", "content": "hi"}}]
    prompt = llm.get_tokenizer().apply_chat_template(messages, tools=[tool], tokenize=False)
    assert '"fox"' in prompt, prompt
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="yes|no"))
    print(llm.generate("the", params, use_tqdm=False)[0].outputs[0].text in ("yes", "no"))
"""
    assert python("-c", code) == "True"


@needs_demo
def test_the_tokenizer_of_a_gguf_file_is_built(python):
    code = """
from paged_backend.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer("demo")
print(tokenizer.decode(tokenizer.encode("Name a colour.")))
"""
    assert python("-c", code) == "Name a colour."


HUGGINGFACE = "pip install 'paged-backend[huggingface]'"


def test_a_tool_that_is_a_function_says_what_to_install(python):
    code = "from paged_backend.text.chat_template import tool_schema\ntool_schema(print)"
    said = python("-c", code, fails=True).splitlines()[-1]
    assert said.endswith(f"a tool that is a function and no JSON schema needs transformers: {HUGGINGFACE}")


def test_a_tokenizer_that_only_transformers_builds_says_what_to_install(python, tmp_path):
    code = f"from paged_backend.text.tokenizer import load_tokenizer\nload_tokenizer({str(tmp_path)!r})"
    (tmp_path / "spiece.model").touch()
    said = python("-c", code, fails=True).splitlines()[-1]
    assert said.endswith(f"which has no tokenizer.json, needs transformers: {HUGGINGFACE}")


def test_a_model_that_runs_as_a_module_of_transformers_says_what_to_install(python, tmp_path, tiny_model):
    for file in Path(tiny_model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config.update(model_type="ctrl", architectures=["CTRLLMHeadModel"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    (said,) = python("-m", "paged_backend", "run", str(tmp_path), "hi", *OPTIONS, fails=True).splitlines()
    assert "CTRLLMHeadModel" in said
    assert said.endswith(f"its module in transformers needs torch: {HUGGINGFACE}")


@pytest.mark.parametrize("options", [["--device", "cuda"], ["--kernels", "triton"]])
def test_a_gpu_says_what_to_install(python, tiny_model, options):
    (said,) = python("-m", "paged_backend", "run", tiny_model, "hi", *options, fails=True).splitlines()
    assert said.endswith("a GPU needs torch: pip install 'paged-backend[triton]'")


def test_the_hugging_face_adapter_says_what_to_install(python):
    said = python("-c", "import paged_backend.adapters.huggingface", fails=True).splitlines()[-1]
    assert said.endswith(f"this adapter needs torch: {HUGGINGFACE}")
