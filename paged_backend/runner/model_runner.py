"""ModelRunner: runs one step of a model over the paged KV cache. It knows nothing of queues, streams or clients."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from typing import Protocol

from paged_backend.batch import Batch
from paged_backend.kernels.array import address
from paged_backend.kernels.base import AttentionInputs, DeviceArray, Kernels
from paged_backend.kernels.kv_cache import CacheSpec, LayerCache
from paged_backend.models.spec import DecoderSpec
from paged_backend.runner.base import Result, Runner, ScheduledSequence
from paged_backend.runner.sampler import Sampled, Sampler, SampleRow


class Model(Protocol):
    """What can be run: the native decoder, or anything with the same forward. Arrays are those of its kernels."""

    spec: DecoderSpec

    def forward(
        self,
        input_ids: DeviceArray,
        positions: DeviceArray,
        attention: AttentionInputs,
        logit_rows: DeviceArray,
        caches: Sequence[LayerCache],
    ) -> DeviceArray: ...


class ModelRunner(Runner):
    """Owns the model's KV memory: ``num_blocks`` blocks of ``block_size`` tokens in every layer."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        num_blocks: int,
        block_size: int,
        kv_dtype: str = "float32",
    ) -> None:
        spec = model.spec
        self.model = model
        self.kernels = kernels
        self.block_size = block_size
        self.vocab_size = spec.vocab_size
        self.caches = kernels.empty_cache(
            spec.num_layers, num_blocks, spec.num_kv_heads, spec.head_dim, block_size, kv_dtype
        )
        self.sampler = Sampler()

    @staticmethod
    def block_bytes(spec: DecoderSpec, block_size: int, kv_dtype: str = "float32") -> int:
        """Bytes of one block over all layers."""
        cache = CacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, kv_dtype)
        return cache.block_bytes

    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[Result]:
        batch = Batch.build(scheduled, self.block_size).on(self.kernels)
        logits = self.kernels.to_host(
            self.model.forward(
                batch.input_ids, batch.positions, batch.attention, batch.logit_rows, self.caches
            )
        )
        scores: list[list[Sampled]] = []
        picks: list[int] = []
        rows: list[SampleRow] = []
        first = 0
        for sequence in scheduled:
            count = len(sequence.scored_ids)
            scores.append(
                self.sampler.prompt_logprobs(
                    logits[first : first + count], sequence.scored_ids, sequence.num_top
                )
                if count
                else []
            )
            first += len(sequence.logit_rows)
            picks.extend([first - 1] * len(sequence.rows))
            rows.extend(sequence.rows)
        sampled: list[Sampled | Exception] = []
        if rows:
            whole = picks == list(range(logits.shape[0]))
            sampled = self.sampler.sample(logits if whole else logits[picks], rows)
        drawn = iter(sampled)
        return [
            Result([next(drawn) for _ in sequence.rows], score) for sequence, score in zip(scheduled, scores)
        ]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.kernels.copy_blocks(self.caches, pairs)

    def give_back(self, blocks: Sequence[int]) -> bool:
        """Return the memory of ``blocks`` (ascending, holding nothing) to the operating system; Linux only.

        Of a page that two blocks share, it goes when both are given back at once.
        """
        if not sys.platform.startswith("linux"):
            return False
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
        page = mmap.PAGESIZE
        runs: list[tuple[int, int]] = []
        for block in blocks:
            if runs and runs[-1][1] == block:
                runs[-1] = (runs[-1][0], block + 1)
            else:
                runs.append((block, block + 1))
        for cache in self.caches:
            for array in cache.parts:
                first, size = address(array), array[0].nbytes
                for low, high in runs:
                    start = -(-(first + low * size) // page) * page
                    stop = (first + high * size) // page * page
                    if stop > start:
                        madvise(start, stop - start, mmap.MADV_DONTNEED)
        return True
