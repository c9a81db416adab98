"""Launcher: grids and compile-time constants of every kernel, from tensors; the only caller of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_backend.kernels.base import AttentionInputs
from paged_backend.kernels.kv_cache import LayerCache
from paged_backend.kernels.triton import activation as activation_kernels
from paged_backend.kernels.triton import attention as attention_kernels
from paged_backend.kernels.triton import (
    attention_merge,
    copy_blocks,
    int_matmul,
    norm,
    penalties,
    rotary,
    sampling,
)
from paged_backend.kernels.triton.interpreted import use_row_products
from paged_backend.kernels.triton.quantize import IntWeights
from paged_backend.kernels.triton.tiles import SEGMENT, Tiles, attention_tiles, matmul_tiles, pow2, short_rows

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_COLUMNS = 16384  # of a row that a program of rms_norm can hold
_COPY_WORDS = 1024
_SAMPLE_TOKENS = 2048
_SAMPLE_STAGES = 4  # three blocks of 8 KB under way while one is worked on, which outlasts the way from L2
_COUNTED_TOKENS = 1024
_PENALISED_TOKENS = 1024
_ACTIVATION_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """query_counts: how many queries sequences may have in this step. longest: bound of their contexts."""

    inputs: AttentionInputs
    query_counts: tuple[int, ...]
    longest: int


class Launcher:
    """Launches kernels.

    interpreted: Triton's interpreter runs them. capability: see ``tiles``. processors: of the device, to size
    grids by.
    """

    def __init__(self, interpreted: bool, capability: int, processors: int) -> None:
        self.interpreted, self.capability, self.processors = interpreted, capability, processors

    @classmethod
    def for_device(cls, device: torch.device) -> Launcher:
        """What suits ``device``; on a CPU, the interpreter."""
        if device.type == "cpu":
            use_row_products()
            return cls(True, 90, 4)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        major, minor = torch.cuda.get_device_capability(device)
        return cls(False, 10 * major + minor if torch.version.hip is None else 0, processors)

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: int) -> None:
        """Run ``kernel`` once for each index of ``grid``; the one place where that happens."""
        kernel[grid](*args, **options)

    def _options(self, tiles: Tiles) -> dict[str, int]:
        # AMD's compiler fetches ahead through registers, and spills beyond two stages
        stages = tiles.num_stages if self.capability else min(tiles.num_stages, 2)
        options = {"num_warps": tiles.num_warps, "num_stages": stages}
        if tiles.registers is not None and self.capability:
            options["maxnreg"] = tiles.registers
        return options

    def _wide(self, dtype: torch.dtype) -> Any:
        """The dtype that products of ``dtype`` are taken in. The interpreter knows bfloat16 as bits only."""
        return tl.float32 if self.interpreted else _TYPES[dtype]

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        d = x.shape[-1]
        if d > _COLUMNS:
            raise ValueError(f"rms_norm takes rows of at most {_COLUMNS} elements, got {d}")
        out = torch.empty_like(x)
        rows, block = x.numel() // d, pow2(d)
        if rows:
            self.launch(norm.rms_norm, (rows,), 
                x, x if residual is None else residual, weight, out, d, eps, residual is not None, block,
                num_warps=min(max(block // 512, 1), 8),
            )  # fmt: skip
        return out

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        rows, d = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, d)
        block = min(pow2(d), _ACTIVATION_COLUMNS)
        if rows:
            grid = (rows, triton.cdiv(d, block))
            self.launch(activation_kernels.act_and_mul, grid, x, out, d, activation, block, num_warps=4)
        return out

    def rotary_and_cache(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, slots: Tensor
    ) -> None:
        tokens, heads, d = q.shape
        groups, half = k.shape[1], cos.shape[1]
        at_once = min(pow2(max(heads, groups)), 8)
        parts = triton.cdiv(heads, at_once) + triton.cdiv(groups, at_once)
        if tokens:
            self.launch(rotary.rotary_and_cache, (tokens, parts), 
                q, k, v, cos, sin, cache.key, cache.value, *_scales(cache), slots,
                token_stride(q), token_stride(k), token_stride(v),
                heads, groups, d, half, cache.block_size, at_once, pow2(half), pow2(d),
                cache.key_scale is not None, num_warps=4,
            )  # fmt: skip

    def attention(
        self,
        plan: AttentionPlan,
        q: Tensor,
        cache: LayerCache,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        tokens, heads, d = q.shape
        _, groups, _, block_size = cache.key.shape
        group, sequences = heads // groups, plan.inputs.seq_lens.shape[0]
        out = torch.empty(tokens, heads * d, dtype=q.dtype, device=q.device)
        if not tokens:
            return out
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        most_short = short_rows(group) // group
        inputs, scales = plan.inputs, _scales(cache)
        flags = (window is not None, softcap is not None, sinks is not None)
        segments = triton.cdiv(plan.longest, SEGMENT)
        short_queries = max((n for n in plan.query_counts if n <= most_short), default=0)
        for short in (True, False):
            if not (short_queries if short else max(plan.query_counts) > most_short):
                continue
            tiles = attention_tiles(q.dtype, cache.key.dtype, d, group, short, self.capability)
            split = short and segments > 1
            grid: tuple[int, ...] = ((tokens // (tiles.block_m // group) + sequences) * groups,)
            partial, lse, workers = out, out, 1
            places = sequences * short_queries
            if split:
                partial = torch.empty(places, heads, segments, d, dtype=torch.float32, device=q.device)
                lse = torch.empty(places, heads, segments, dtype=torch.float32, device=q.device)
                # some programs for each place on the device, as contexts differ; the segments' results do not know
                workers = max(1, min(segments, triton.cdiv(8 * self.processors, sequences * groups)))
            if short:
                grid = (sequences, groups, workers)
            self.launch(attention_kernels.attention, grid, 
                q, cache.key, cache.value, partial, lse, sinks if sinks is not None else lse,
                inputs.query_start_loc, inputs.seq_lens, inputs.block_table, *scales,
                sequences, inputs.block_table.stride(0), token_stride(q), short_queries, segments, workers,
                scale, softcap or 0.0, window or 0,
                heads, groups, group, d, max(16, pow2(d)), block_size, tiles.block_m, tiles.block_n, SEGMENT,
                most_short, short, split, *flags, self._wide(q.dtype), _TYPES[q.dtype],
                cache.key_scale is not None,
                **self._options(tiles),
            )  # fmt: skip
            if split:
                self.launch(attention_merge.attention_merge, (places, heads), 
                    partial, lse, sinks if sinks is not None else lse, out, inputs.query_start_loc, inputs.seq_lens,
                    short_queries, segments, window or 0,
                    heads, d, max(16, pow2(d)), SEGMENT, most_short, flags[0], flags[2], num_warps=1,
                )  # fmt: skip
        return out

    def int_matmul(self, x: Tensor, weights: IntWeights, bias: Tensor | None) -> Tensor:
        rows, k = x.shape
        n = weights.numbers.shape[0]
        out = x.new_empty(rows, n)
        tiles = matmul_tiles(x.dtype, rows)
        if rows:
            self.launch(int_matmul.int_matmul, (triton.cdiv(rows, tiles.block_m), triton.cdiv(n, tiles.block_n)), 
                x, weights.numbers, weights.scale, weights.scale if weights.minimum is None else weights.minimum,
                weights.scale if bias is None else bias, out, rows, n, k, triton.cdiv(k, 32),
                weights.bits, bias is not None, tiles.block_m, tiles.block_n, tiles.block_k,
                self._wide(x.dtype), **self._options(tiles),
            )  # fmt: skip
        return out

    def copy_blocks(self, caches: Sequence[LayerCache], pairs: Sequence[tuple[int, int]]) -> None:
        by_size: dict[int, list[Tensor]] = {}
        for part in (part for cache in caches for part in cache.parts):
            by_size.setdefault(part[0].nbytes, []).append(part)
        for size in by_size:
            if size % 4:
                raise ValueError(f"a block of a layer must be a multiple of 4 bytes, got {size}")
        ids = _sent(pairs, caches[0].key.device)
        for size, tensors in by_size.items():
            addresses = _sent([t.data_ptr() for t in tensors], ids.device)
            grid = (len(pairs), len(tensors), triton.cdiv(size // 4, _COPY_WORDS))
            self.launch(copy_blocks.copy_blocks, grid, addresses, ids, size // 4, _COPY_WORDS, num_warps=4)

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, noise: Tensor
    ) -> Tensor:
        rows, v = logits.shape
        if logits.dtype != torch.float32 or (rows and logits.stride(1) != 1):
            raise ValueError("logits must be float32 with contiguous rows")
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if rows:
            self.launch(sampling.sample, (rows,), 
                logits, temperature, top_k, top_p, min_p, noise, tokens, v, logits.stride(0),
                min(_SAMPLE_TOKENS, pow2(v)), _SAMPLE_STAGES if self.capability else 2, num_warps=8,
            )  # fmt: skip
        return tokens

    def penalise(self, logits: Tensor, ids: Tensor, by: penalties.Penalties) -> None:
        rows, v = logits.shape
        if not rows:
            return
        counts = torch.zeros(rows, v, dtype=torch.int32, device=logits.device)
        self.launch(penalties.count_tokens, (rows, triton.cdiv(by.longest, _COUNTED_TOKENS)),
            counts, ids, by.block_table, by.block_table.stride(0), by.seq_lens, by.sequences, by.prompt_lens, v,
            ids.shape[1], _COUNTED_TOKENS, num_warps=4,
        )  # fmt: skip
        self.launch(penalties.penalise, (rows, triton.cdiv(v, _PENALISED_TOKENS)),
            logits, counts, by.prompt_lens, by.repetition, by.frequency, by.presence, v, logits.stride(0),
            _PENALISED_TOKENS, num_warps=4,
        )  # fmt: skip


def _scales(cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Bits of the scales of a cache of codes; of another one, tensors that are not looked at."""
    if cache.key_scale is None:
        return cache.key, cache.value
    return cache.key_scale.view(torch.int16), cache.value_scale.view(torch.int16)


def _sent(values: Sequence[Any], device: torch.device) -> Tensor:
    """int64 on the device, without waiting for what runs there."""
    pinned = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def token_stride(x: Tensor) -> int:
    """Distance of tokens in a [T, heads, D] view whose last two dimensions are contiguous."""
    token, head, element = x.stride()
    if element != 1 or (head != x.shape[2] and x.shape[1] > 1):
        raise ValueError(f"heads must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")
    return token
