"""The demo model, a real chat model of 135 million parameters: the drop-in gives transformers' text."""

from __future__ import annotations

import ast
import copy
import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from demo_model import needs_demo

from benchmarks.compare.export import export
from paged_backend.adapters.huggingface import PagedModelForCausalLM, load_tokenizer

pytestmark = [pytest.mark.slow, needs_demo]

PROMPTS = ["The capital of France is", "Once upon a time", "def add(a, b):", "1, 2, 3,"]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 6},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.8, "early_stopping": True},
    "stop strings": {"stop_strings": [",", "."]},
    "lists": {"suppress_tokens": [28, 30], "bad_words_ids": [[198], [216, 34]], "eos_token_id": [2, 198]},
}


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any, Any]:
    """(plain transformers model, paged model, tokenizer)."""
    # torch's own products round differently from batch to batch; the reference kernels share that, the C kernels do not
    paged = PagedModelForCausalLM.from_pretrained("demo", kernels="reference")
    plain = copy.deepcopy(PagedModelForCausalLM.from_pretrained("demo", kernels="reference"))
    return plain, paged, load_tokenizer("demo", paged)


@pytest.mark.parametrize("name", CASES)
def test_generate(name: str, demo: tuple[Any, Any, Any]) -> None:
    plain, paged, tokenizer = demo
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 12, "do_sample": False, "tokenizer": tokenizer, **CASES[name]}
    expected, got = (model.generate(**inputs, **options) for model in (plain, paged))
    assert got.tolist() == expected.tolist()
    assert paged._pending


@pytest.mark.timeout(900)
def test_the_documentations_pipeline_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of transformers' TextGenerationPipeline, as they stand there, and with the import changed."""
    folder = export("demo", "hf-float32", tmp_path)
    for name in (
        "openai-community/gpt2",
        "HuggingFaceH4/zephyr-7b-beta",
    ):  # the models that the examples name
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    # the examples name no task, and transformers would ask the hub for it
    monkeypatch.setattr(transformers.pipelines, "get_task", lambda *_: "text-generation")
    examples = doctest.DocTestParser().get_examples(transformers.TextGenerationPipeline.__doc__)
    results = []
    for module in ("transformers", "paged_backend.adapters.huggingface"):
        scope: dict[str, Any] = {}
        shown = []
        for example in examples:
            source = example.source.replace("from transformers import", f"from {module} import")
            if isinstance(ast.parse(source).body[0], ast.Expr):
                shown.append(eval(source, scope))
            else:
                exec(source, scope)
        results.append((shown, scope["outputs"]))
        assert type(scope["generator"]).__module__.startswith(module.split(".")[0])
    (theirs, their_samples), (ours, our_samples) = results
    assert len(theirs) == 2
    assert ours == theirs
    assert [sorted(output) for output in our_samples] == [sorted(output) for output in their_samples]


def test_native_kernels_give_the_same_text(demo: tuple[Any, Any, Any]) -> None:
    plain, _, tokenizer = demo
    native = PagedModelForCausalLM.from_pretrained("demo", kernels="auto")
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 16, "do_sample": False}
    with torch.inference_mode():
        assert native.generate(**inputs, **options).tolist() == plain.generate(**inputs, **options).tolist()
