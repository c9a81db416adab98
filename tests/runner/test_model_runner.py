"""KV memory of the runner: its size by dtype, its return to the system, and which dtype a config asks for."""

from __future__ import annotations

import mmap
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paged_backend.config import EngineConfig
from paged_backend.kernels.array import dtype_name
from paged_backend.kernels.reference import ReferenceKernels
from paged_backend.runner.model_runner import ModelRunner

SPEC: Any = SimpleNamespace(vocab_size=10, num_layers=2, num_kv_heads=3, head_dim=64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_block_bytes_are_what_a_block_takes(dtype: str) -> None:
    runner = ModelRunner(SimpleNamespace(spec=SPEC), ReferenceKernels(), 5, 16, dtype)  # type: ignore[arg-type]
    held = sum(part[0].nbytes for cache in runner.caches for part in cache.parts)
    assert ModelRunner.block_bytes(SPEC, 16, dtype) == held
    assert {dtype_name(cache.key) for cache in runner.caches} == {dtype}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is given back on Linux only")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_only_the_blocks_given_back_are_emptied(dtype: str) -> None:
    runner = ModelRunner(SimpleNamespace(spec=SPEC), ReferenceKernels(), 40, 16, dtype)  # type: ignore[arg-type]
    for cache in runner.caches:
        for part in cache.parts:
            part.view(np.uint8).fill(1)
    runner.give_back([*range(5, 20), 30])
    for cache in runner.caches:
        for part in cache.parts:
            bytes_ = part.view(np.uint8)
            if part[5:20].nbytes > 3 * mmap.PAGESIZE:  # else no page may lie within the blocks
                assert (bytes_[8:17] == 0).all()
            assert (bytes_[:5] == 1).all()
            assert (bytes_[20:30] == 1).all()
            assert (bytes_[31:] == 1).all()


def test_quantized_weights_bring_a_bf16_cache_unless_said_otherwise() -> None:
    assert EngineConfig("x").stored_kv_dtype == "float32"
    assert EngineConfig("x", dtype="bfloat16").stored_kv_dtype == "float32"
    for quantization in ("int8", "int4"):
        assert EngineConfig("x", quantization=quantization).stored_kv_dtype == "bfloat16"
    assert EngineConfig("x", quantization="int8", kv_cache_dtype="float32").stored_kv_dtype == "float32"
    assert EngineConfig("x", kv_cache_dtype="bfloat16").stored_kv_dtype == "bfloat16"
    assert EngineConfig("x", kv_cache_dtype="int8").stored_kv_dtype == "int8"
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        EngineConfig("x", kv_cache_dtype="int4")


def test_int8_takes_half_the_bytes_of_bfloat16_and_a_scale_for_each_head() -> None:
    half, whole = (ModelRunner.block_bytes(SPEC, 16, dtype) for dtype in ("int8", "bfloat16"))
    assert half == whole // 2 + 2 * 2 * 3 * 16 * 2  # layers, keys and values, heads, tokens, bytes of a scale
