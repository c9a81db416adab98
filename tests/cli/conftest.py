"""A tiny random model on disk, with a long context and a chat template."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def model(make_tiny_model) -> str:
    """Folder of a one-layer random Llama (vocabulary 300, context 16384) with a byte-level tokenizer."""
    return make_tiny_model(
        ["pack my box with five dozen liquor jugs " * 20],
        seed=2,
        intermediate_size=48,
        num_hidden_layers=1,
        max_position_embeddings=16384,
    )


@pytest.fixture
def quiet_env() -> dict[str, str]:
    """Environment of a subprocess that shares the machine with the other tests."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
