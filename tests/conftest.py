"""What all tests share: random numbers that repeat, and a tiny model on disk for the whole way from folder to text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import pytest

# deadline: machines that are shared stall for longer than any. A change is judged by the same examples every time;
# --hypothesis-profile=explore draws new ones.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile("project")


@pytest.fixture(autouse=True)
def same_random_numbers_alone_and_in_the_suite() -> None:
    torch = sys.modules.get("torch")  # most tests of the command line do without it
    if torch is not None:
        torch.manual_seed(0)


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory) -> Callable[..., str]:
    """``make_tiny_model(corpus, **config)`` -> folder of a random Llama of two layers (vocabulary 300, context 512)
    with a byte-level tokenizer trained on ``corpus`` and a chat template."""

    def make(corpus: Sequence[str], seed: int = 0, **config: Any) -> str:
        import torch
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        folder = tmp_path_factory.mktemp("tiny")
        torch.manual_seed(seed)
        small: dict[str, Any] = {
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        LlamaForCausalLM(LlamaConfig(**{**small, **config})).save_pretrained(folder)
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        backend.train_from_iterator(corpus, trainer)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
        )
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


FOX = ["the quick brown fox jumps over the lazy dog " * 20]


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model) -> str:
    """Folder of the tiny model, with a context of 1024 tokens."""
    return make_tiny_model(FOX, max_position_embeddings=1024)
