"""What others build on transformers takes our objects unchanged: LangChain, LlamaIndex, PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paged_backend.adapters.huggingface import accelerate, pipeline

GREEDY = {"do_sample": False, "max_new_tokens": 12}


def test_langchain_huggingface_pipeline(
    folder: Path, ours: Any, theirs: Any, tokenizer: Any, said: Any
) -> None:
    langchain = pytest.importorskip("langchain_huggingface")
    import transformers

    stock = transformers.pipeline("text-generation", model=theirs, tokenizer=tokenizer, device="cpu")
    results = []
    for pipe in (stock, pipeline(model=ours, tokenizer=tokenizer)):
        llm = langchain.HuggingFacePipeline(pipeline=pipe, model_id=str(folder), batch_size=8)
        chat = langchain.ChatHuggingFace(llm=llm, model_id=str(folder))
        options = {"pipeline_kwargs": GREEDY}
        results.append(
            [
                llm.invoke("the cat", **options),
                llm.batch(["the cat", "a hat", "once upon a time"], **options),
                "".join(llm.stream("the cat", **options)),
                chat.invoke("the cat?", **options).content,
            ]
        )
    assert results[0] == results[1]
    assert said() == []
    assert ours._pending


def test_llama_index_hugging_face_llm(ours: Any, theirs: Any, tokenizer: Any, said: Any) -> None:
    llama_index = pytest.importorskip("llama_index.llms.huggingface")
    from llama_index.core.llms import ChatMessage

    results = []
    for model in (theirs, ours):
        llm = llama_index.HuggingFaceLLM(
            model=model,
            tokenizer=tokenizer,
            max_new_tokens=12,
            generate_kwargs={"do_sample": False},
            stopping_ids=[2, 40, 41, 42],
            is_chat_model=True,
        )
        results.append(
            [
                llm.complete("the cat", formatted=True).text,
                [chunk.delta for chunk in llm.stream_complete("the cat", formatted=True)],
                llm.chat([ChatMessage(role="user", content="the cat?")]).message.content,
                [chunk.delta for chunk in llm.stream_chat([ChatMessage(role="user", content="a hat")])],
            ]
        )
    assert results[0] == results[1]
    assert said() == []
    assert ours._pending


def test_peft_adapters(folder: Path, ours: Any, theirs: Any, said: Any) -> None:
    peft = pytest.importorskip("peft")
    import copy

    import torch

    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    results = []
    for model in (copy.deepcopy(theirs), ours):
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(model, config)
        adapted = wrapped.generate(torch.tensor([[5, 9, 44]]), **GREEDY, pad_token_id=0).tolist()
        merged = (
            wrapped.merge_and_unload().generate(torch.tensor([[5, 9, 44]]), **GREEDY, pad_token_id=0).tolist()
        )
        results.append([adapted, merged])
    assert results[0] == results[1]
    with pytest.raises(ValueError, match="merge"):
        accelerate(peft.get_peft_model(copy.deepcopy(theirs), config).base_model.model)
    assert len(said()) == 1, "adapters run on transformers; once merged, the engine has them"
