"""What all tests share: random numbers that repeat, and a tiny model on disk for the whole way from folder to text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import pytest
from tiny_llama import write_tiny_llama

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


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory) -> Callable[..., str]:
    """``make_tiny_model(corpus, **config)`` -> folder of a random Llama of two layers (vocabulary 300, context 512)
    with a byte-level tokenizer trained on ``corpus`` and a chat template."""

    def make(corpus: Sequence[str], seed: int = 0, **config: Any) -> str:
        folder = tmp_path_factory.mktemp("tiny")
        write_tiny_llama(folder, corpus, seed, **config)
        return str(folder)

    return make


FOX = ["the quick brown fox jumps over the lazy dog " * 20]


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model) -> str:
    """Folder of the tiny model, with a context of 1024 tokens."""
    return make_tiny_model(FOX, max_position_embeddings=1024)
