"""Small random checkpoints made with transformers, and a paged runner over our real loading code."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paged_backend.batch import Batch
from paged_backend.config import EngineConfig
from paged_backend.kernels.reference import ReferenceKernels
from paged_backend.models.loading import LoadedModel, load_model
from paged_backend.sequence_slice import SequenceSlice

BLOCK = 4


@dataclass
class Sequence_:
    """Tokens computed so far and the blocks that hold their keys and values."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class PagedModel:
    """A loaded model over a pool that starts as NaN, whose blocks are handed out in random order."""

    def __init__(self, loaded: LoadedModel, num_blocks: int = 400, seed: int = 0) -> None:
        self.spec, self.decoder, self.kernels = loaded.spec, loaded.decoder, loaded.decoder.kernels
        self.caches = self.kernels.empty_cache(
            self.spec.num_layers, num_blocks, self.spec.num_kv_heads, self.spec.head_dim, BLOCK
        )
        for cache in self.caches:
            cache.key.fill(np.nan)
            cache.value.fill(np.nan)
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)

    def step(self, work: Sequence[tuple[Sequence_, Sequence[int]]]) -> list[Tensor]:
        """Append tokens to each sequence in one flat batch; logits of all of them, per sequence."""
        slices = []
        for sequence, new in work:
            start = len(sequence.tokens)
            while len(sequence.blocks) * BLOCK < start + len(new):
                sequence.blocks.append(self.free.pop())
            blocks = np.array(sequence.blocks, np.int32)
            slices.append(SequenceSlice(list(new), start, blocks, range(len(new))))
            sequence.tokens.extend(new)
        batch = Batch.build(slices, BLOCK)
        logits = torch.from_numpy(
            self.decoder.forward(
                batch.input_ids, batch.positions, batch.attention, batch.logit_rows, self.caches
            )
        )
        assert torch.isfinite(logits).all()
        return list(logits.split([len(new) for _, new in work]))

    def logits(self, prompt: Sequence[int], chunks: Sequence[int] | None = None) -> Tensor:
        """Logits [len(prompt), vocab] of a fresh sequence computed in chunks of the given sizes."""
        sequence, out, at = Sequence_(), [], 0
        for size in chunks or [len(prompt)]:
            out += self.step([(sequence, prompt[at : at + size])])
            at += size
        assert at == len(prompt)
        return torch.cat(out)

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        sequence, new, tokens = Sequence_(), list(prompt), []
        for _ in range(steps):
            (logits,) = self.step([(sequence, new)])
            new = [int(logits[-1].argmax())]
            tokens += new
        return tokens


@dataclass(frozen=True)
class Pair:
    """One checkpoint in both implementations."""

    path: Path
    theirs: Any
    ours: PagedModel

    @torch.inference_mode()
    def their_logits(self, prompt: Sequence[int]) -> Tensor:
        return self.theirs(torch.tensor([list(prompt)])).logits[0]

    @torch.inference_mode()
    def their_greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        out = self.theirs.generate(
            torch.tensor([list(prompt)]), max_new_tokens=steps, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights large enough to matter, norms and biases included, so that nothing wrong can hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)


@pytest.fixture(scope="session")
def save_random(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """(model class, config) -> (folder, model): random weights written by save_pretrained."""

    def save(model_class: Any, config: Any, **options: Any) -> tuple[Path, Any]:
        config._attn_implementation = "eager"
        model = model_class(config).eval()
        randomize(model)
        model.generation_config.eos_token_id = None
        path = tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(path, **options)
        return path, model

    return save


@pytest.fixture(scope="session")
def paged() -> Callable[..., PagedModel]:
    """folder, engine options -> our model of it."""

    def load(path: Path, **options: Any) -> PagedModel:
        return PagedModel(load_model(EngineConfig(str(path), **options), ReferenceKernels()))

    return load


@pytest.fixture(scope="session")
def make_pair(
    save_random: Callable[..., tuple[Path, Any]], paged: Callable[..., PagedModel]
) -> Callable[..., Pair]:
    """(model class, config, engine options) -> Pair."""

    def make(model_class: Any, config: Any, **options: Any) -> Pair:
        path, theirs = save_random(model_class, config)
        return Pair(path, theirs, paged(path, **options))

    return make


@pytest.fixture(scope="session")
def close() -> Callable[[Tensor, Tensor], None]:
    """Assert that logits agree to 1e-4 of the largest."""

    def check(ours: Tensor, theirs: Tensor) -> None:
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()

    return check


@pytest.fixture(scope="session")
def new_sequence() -> type[Sequence_]:
    return Sequence_
