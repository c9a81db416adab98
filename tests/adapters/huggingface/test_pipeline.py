"""The pipeline: transformers' call, results and streaming, but all inputs in the engine at once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, TextStreamer

from paged_backend.adapters.huggingface import PagedTextGenerationPipeline, pipeline

GREEDY = {"do_sample": False, "max_new_tokens": 12}
CHAT = [{"role": "user", "content": "the cat?"}]
TEXTS = ["the cat", "once upon a time", "a hat and the", "it", "the story of it and the cat"]


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    return transformers.pipeline("text-generation", model=str(folder), device="cpu")


@pytest.fixture(scope="module")
def paged(folder: Path) -> Any:
    return pipeline("text-generation", model=str(folder), kernels="reference")


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ("the cat", {}),
        (["the cat"], {}),
        (TEXTS, {}),
        (TEXTS, {"return_full_text": False}),
        (TEXTS, {"return_tensors": True}),
        (TEXTS, {"batch_size": 2}),
        (TEXTS, {"num_beams": 3, "num_return_sequences": 2}),
        (TEXTS, {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2}),
        (TEXTS, {"stop_sequence": "the"}),
        (TEXTS, {"prefix": "and so "}),
        (TEXTS, {"max_new_tokens": None, "max_length": 30}),
        (TEXTS, {"skip_special_tokens": False}),
        (TEXTS, {"return_dict_in_generate": True, "output_logits": True}),
        (["", "the cat"], {}),
        (CHAT, {}),
        ([CHAT, [*CHAT, {"role": "assistant", "content": "it"}]], {}),
        ([CHAT, CHAT], {"return_full_text": False}),
    ],
)
def test_same_results_as_transformers(inputs: Any, options: dict[str, Any], stock: Any, paged: Any) -> None:
    options = {name: value for name, value in {**GREEDY, **options}.items() if value is not None}
    expected = stock(inputs, **{k: v for k, v in options.items() if k != "batch_size"})
    got = paged(inputs, **options)
    assert repr_of(got) == repr_of(expected)
    assert paged.model._pending


def repr_of(value: Any) -> Any:
    """Results without the floats of logits."""
    if isinstance(value, list):
        return [repr_of(item) for item in value]
    return {k: v for k, v in value.items() if k != "logits"} if isinstance(value, dict) else value


def test_all_inputs_are_in_one_batch(paged: Any) -> None:
    engine = paged.model.engine
    before = engine.stats()
    paged(TEXTS * 4, do_sample=False, max_new_tokens=30, min_new_tokens=30)
    after = engine.stats()
    assert after.generation_tokens - before.generation_tokens == 20 * 30
    assert after.num_steps - before.num_steps < 20 * 30 / 4


def test_generators_and_datasets_stream_in_order(stock: Any, paged: Any) -> None:
    expected = stock(TEXTS * 3, **GREEDY)
    read: list[str] = []

    def texts() -> Any:
        for text in TEXTS * 3:
            read.append(text)
            yield text

    class Texts(Dataset):
        def __len__(self) -> int:
            return len(TEXTS) * 3

        def __getitem__(self, index: int) -> str:
            if index >= len(self):
                raise IndexError(index)
            return (TEXTS * 3)[index]

    small = PagedTextGenerationPipeline(model=paged.model, tokenizer=paged.tokenizer, device="cpu")
    small.max_in_flight = 4
    results = small(texts(), **GREEDY)
    first = next(iter(results))
    assert len(read) <= 5, "it reads ahead a bounded number of inputs"
    assert [first, *results] == expected
    assert list(paged(Texts(), **GREEDY)) == expected


def test_leaving_a_stream_early_stops_what_runs(paged: Any) -> None:
    results = paged((text for text in TEXTS * 3), max_new_tokens=60, min_new_tokens=60, do_sample=False)
    next(results)
    results.close()
    paged.model.engine.check()
    assert paged.model.engine.stats().num_running == 0 or paged.model.engine.submit([5]).result(60).finished


def test_one_bad_input_raises_and_the_pipeline_goes_on(paged: Any) -> None:
    with pytest.raises(ValueError, match="max_length"):
        paged(["the cat", "once upon a time there was a story of it"], do_sample=False, max_length=8)
    assert len(paged(TEXTS, **GREEDY)) == len(TEXTS)


def test_streamer_and_sampling(paged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextStreamer(paged.tokenizer)
    (result,) = paged("once upon", **GREEDY, streamer=streamer)
    assert capsys.readouterr().out.strip() == result["generated_text"].strip()
    torch.manual_seed(1)
    one = paged(TEXTS, max_new_tokens=8, num_return_sequences=2, do_sample=True)
    torch.manual_seed(1)
    assert paged(TEXTS, max_new_tokens=8, num_return_sequences=2, do_sample=True) == one
    assert [len(r) for r in one] == [2] * len(TEXTS)


def test_ways_to_make_one(folder: Path, ours: Any, tokenizer: Any) -> None:
    expected = transformers.pipeline("text-generation", model=ours, tokenizer=tokenizer, device="cpu")(
        TEXTS, **GREEDY
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = [
        pipeline(model=ours),
        pipeline("text-generation", ours, tokenizer),
        pipeline(model=model, tokenizer=tokenizer, kernels="reference"),
        pipeline(model=ours, device="cpu"),
        pipeline(
            model=str(folder.parent),
            model_kwargs={"subfolder": folder.name},
            use_fast=True,
            kernels="reference",
        ),
        pipeline(model=str(folder), device=-1, kernels="reference"),
        pipeline(model=str(folder), device=torch.device("cpu"), device_map="auto", kernels="reference"),
        transformers.pipeline(
            "text-generation",
            model=ours,
            tokenizer=tokenizer,
            device="cpu",
            pipeline_class=PagedTextGenerationPipeline,
        ),
    ]
    for pipe in made:
        assert pipe(TEXTS, **GREEDY) == expected


def test_transformers_own_decoding_loops(theirs: Any, ours: Any, tokenizer: Any, said: Any) -> None:
    def loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids + 1

    results = []
    for model, make in ((theirs, transformers.pipeline), (ours, pipeline)):
        pipe = make("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        results.append(pipe(TEXTS[:2], custom_generate=loop))
        assisted = make(
            "text-generation", model=model, tokenizer=tokenizer, device="cpu", assistant_model=theirs
        )
        results[-1] += assisted(TEXTS[:2], **GREEDY)
    assert results[0] == results[1]
    assert len(said()) == 4


def test_how_the_model_is_loaded(folder: Path, theirs: Any, tokenizer: Any) -> None:
    for options in (
        {"torch_dtype": torch.bfloat16},
        {"dtype": "bfloat16"},
        {"model_kwargs": {"dtype": torch.bfloat16}},
    ):
        pipe = pipeline(model=str(folder), kernels="reference", **options)
        assert pipe.model.dtype == torch.bfloat16
        assert pipe(TEXTS, max_new_tokens=2, do_sample=False)
    same = pipeline(
        model=copy.deepcopy(theirs), tokenizer=tokenizer, dtype=torch.float32, kernels="reference"
    )
    assert same.model.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"config": "other"}, "config"),
        ({"device_map": "cuda"}, "CPU"),
        ({"device": "cuda"}, "CPU"),
        ({"device": 0}, "CPU"),
        ({"dtype": torch.float16}, "float16"),
    ],
)
def test_loading_that_cannot_be_honoured_raises(
    options: dict[str, Any], message: str, folder: Path, ours: Any, tokenizer: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline(model=str(folder), kernels="reference", **options)
    with pytest.raises(ValueError, match=message):
        pipeline(model=ours, tokenizer=tokenizer, **options)


def test_loading_beside_a_loaded_model_raises(ours: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="loaded already"):
        pipeline(model=ours, tokenizer=tokenizer, torch_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="attn_implementation"):
        pipeline(model=ours, tokenizer=tokenizer, model_kwargs={"attn_implementation": "eager"})


def test_what_is_refused(folder: Path, theirs: Any, tokenizer: Any, ours: Any) -> None:
    with pytest.raises(ValueError, match="text-generation"):
        pipeline("fill-mask", model=str(folder))
    with pytest.raises(ValueError, match="give a model"):
        pipeline("text-generation")
    with pytest.raises(ValueError, match="when the model is made"):
        pipeline(model=ours, max_num_seqs=4)
    with pytest.raises(TypeError, match="paged model"):
        PagedTextGenerationPipeline(model=theirs, tokenizer=tokenizer, device="cpu")
