"""One process, one engine: LangChain, LlamaIndex and the LLM class on one model share weights, pool and prefixes."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")
pytest.importorskip("llguidance")

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core import Document, PromptTemplate, SummaryIndex

from paged_backend import LLM, SamplingParams
from paged_backend.adapters.langchain import ChatPaged
from paged_backend.adapters.langchain import PagedLLM as LangChainLLM
from paged_backend.adapters.llama_index import PagedLLM as LlamaIndexLLM
from paged_backend.testing import CHATML, small_tokenizer

CONTEXT = "The garden was founded in 1852 and has a ginkgo, a pond and a very long bench. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with a random 2-layer Llama and the small tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    tokenizer = small_tokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return str(folder)


def test_three_frameworks_one_engine_one_pool_and_each_other_s_prefixes(model):
    system = f"Answer from this: {CONTEXT}"
    with LLM(model) as llm:
        chat = ChatPaged(model=model, temperature=0, max_tokens=6)
        chain = (
            ChatPromptTemplate.from_messages([("system", "{context}"), ("human", "{q}")])
            | chat
            | StrOutputParser()
        )
        index_llm = LlamaIndexLLM(model, temperature=0, max_tokens=6)
        template = PromptTemplate("{context_str}\n{query_str}")
        query = SummaryIndex.from_documents([Document(text=CONTEXT)]).as_query_engine(
            llm=index_llm, text_qa_template=template
        )
        engine = llm.engine

        chain.invoke({"context": system, "q": "one?"})
        assert engine.stats().prefix_cache_hits == 0
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "two?"}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        shared = len(engine.tokenizer.encode(system, add_special_tokens=False))
        assert output.num_cached_tokens >= shared - 32

        from llama_index.core.llms import ChatMessage

        asked = [ChatMessage(role=m["role"], content=m["content"]) for m in messages]
        response = index_llm.chat(asked)
        assert response.raw["usage"]["cached_tokens"] >= shared - 32
        assert response.message.content == output.outputs[0].text
        before = engine.stats().prompt_tokens
        query.query("three?")
        assert engine.stats().prompt_tokens > before

        users = (chat, index_llm, LangChainLLM(model=model))
        assert all(user._uses.get(model).model is engine.model for user in users)
        assert engine.stats().kv_blocks_used == 0
        for user in users:
            user.close()
            assert engine.health == "ok"
        pool = engine
    assert pool.health == "closed"


def test_a_dropped_model_leaves_its_engine_open_and_close_really_closes(model):
    first = ChatPaged(model=model, temperature=0, max_tokens=2)
    first.invoke("hi")
    opened = first._uses.get(model).model
    del first
    gc.collect()
    assert opened.loop.health == "ok"
    second = ChatPaged(model=model, temperature=0, max_tokens=2)
    second.invoke("hi")
    assert second._uses.get(model).model is opened
    copy = second.model_copy(update={"max_tokens": 3})
    assert copy._uses.get(model).model is opened
    second.close()
    assert opened.loop.health == "closed"
    assert copy.invoke("hi").content is not None
    assert copy._uses.get(model).model is not opened
    copy.close()


def test_two_models_and_a_model_named_in_the_call(model):
    chat = ChatPaged(model="nowhere/none", temperature=0, max_tokens=2)
    message = chat.invoke("hi", model=model)
    assert message.response_metadata["model_name"] == model
    assert set(chat._uses._engines) == {model}
    chat.close()
