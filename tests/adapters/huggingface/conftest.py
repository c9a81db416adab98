"""A tiny chat model with a byte-level tokenizer, in a folder, as transformers has it and as the adapter makes it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from paged_backend.adapters.huggingface import PagedModelForCausalLM

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["the cat and the hat, once upon a time there was a story of it"] * 4, trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


@pytest.fixture(scope="session")
def theirs(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def ours(folder: Path) -> Any:
    """A fresh paged model, its module not loaded yet; tests share the engine behind it."""
    return PagedModelForCausalLM.from_pretrained(folder, kernels="reference")


@pytest.fixture(scope="session", autouse=True)
def engine(folder: Path) -> Iterator[Any]:
    """Keeps the shared engine open for the session and checks in the end that nothing leaked."""
    model = PagedModelForCausalLM.from_pretrained(folder, kernels="reference")
    yield model.engine
    model.engine.check()
    assert model.engine.stats().kv_blocks_used == 0


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """() -> what the adapter has logged about calls that it left to transformers."""
    caplog.set_level(logging.INFO, "paged_backend")

    def fallbacks() -> list[str]:
        return [
            r.getMessage() for r in caplog.records if "transformers' own implementation" in r.getMessage()
        ]

    return fallbacks


@pytest.fixture
def encode(tokenizer: Any) -> Any:
    """Texts -> left-padded input_ids and attention_mask."""

    def make(*texts: str) -> dict[str, torch.Tensor]:
        made = tokenizer(list(texts), return_tensors="pt", padding=True)
        return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"]}

    return make
