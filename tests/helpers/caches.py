"""KV caches in whose memory whatever is read by mistake shows."""

from __future__ import annotations

import torch

from paged_backend.kernels.kv_cache import LayerCache


def poisoned_cache(blocks: int, heads: int, dim: int, size: int, dtype: torch.dtype) -> LayerCache:
    """Memory of which whatever is read shows: NaN; of codes, which have none, the scales are."""
    shapes = (blocks, heads, dim, size), (blocks, heads, size, dim)
    if dtype != torch.int8:
        return LayerCache(*(torch.full(shape, float("nan"), dtype=dtype) for shape in shapes))
    codes = [torch.randint(-128, 128, shape, dtype=dtype) for shape in shapes]
    scales = (torch.full((blocks, heads, size), float("nan"), dtype=torch.bfloat16) for _ in shapes)
    return LayerCache(*codes, *scales)
