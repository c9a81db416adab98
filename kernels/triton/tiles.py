"""Tile shapes of every kernel: functions of the model and the dtype, of the batch only where a docstring says so.

A tile fixes the order in which a dot product is summed. What a request gets must not depend on its batch-mates,
so nothing here looks at how many sequences there are. ``capability``: 80, 90, 100 for NVIDIA's, 0 for AMD's.
The figures are the largest that compile without spilling registers for sm_80, sm_90, sm_100 and gfx942
(``python -m benchmarks kernels`` prints the table).

``num_stages`` counts what Triton's pipeliner spreads a tile over, not the buffers it gets: in attention the ids in
the block table, the addresses made from them and the products each take a stage, so that 5 stages are 3 buffers of
keys and values on capability 90 and up and 2 before it, of which one is always under way, and at 3 stages a
program waits for each tile as soon as it has asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

SEGMENT = 512
"""Tokens of context after which decode attention starts a new partial result; a multiple of every ``block_n``."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """One launch configuration. block_m rows, block_n columns, block_k the inner dimension (0: not tiled).

    registers: what a thread may have (NVIDIA). Left to itself (None), ptxas may choose fewer so that more programs
    fit at once, and spill what is then too much.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    registers: int | None = None


def pow2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def short_rows(group: int) -> int:
    """Rows of the tile of short queries: at least what a matrix instruction takes, at least one query's heads."""
    return max(16, pow2(group))


def attention_tiles(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, group: int, short: bool, capability: int
) -> Tiles:
    """dtype: of the queries. head_dim D, group: query heads per key head. short: queries of few tokens (decode).

    Decode is bound by memory: the fewest rows, and as many bytes under way as can be: programs of 4 warps. With
    heads of 128 they have 168 registers and 73 KB, of which a processor of capability 90 and up holds three and one of
    80 two; with heads of 64, four or five.
    Prefill is bound by the tensor cores: many rows share a tile of keys, as many as registers allow, which are more
    where accumulators can be fed from shared memory (capability 90 up to 119; from 120 on are consumer cards, built
    like those before 90). One such program of 8 warps fills a processor's registers; heads of up to 64 leave room for
    two of 4 warps, or of 8 on capability 90. The next tile is fetched while one is multiplied, which a head of 256 has
    the shared memory for on data-centre cards only. float32 is multiplied without tensor cores and is meant for
    checking, not for speed.
    """
    small = head_dim <= 128
    if kv_dtype == torch.int8:
        # Fetching ahead leaves codes as tensor cores want 16-bit numbers, not as they lie in memory, and does not
        # compile. Widening takes registers: all that there are, before capability 90 fewer rows, and of large heads
        # fewer keys.
        tiles = attention_tiles(dtype, dtype, head_dim, group, short, capability)
        rows = tiles.block_m
        if not short and not 90 <= capability < 120:
            rows = min(rows, max(64, pow2(group)))
        keys = tiles.block_n if small or short else 16
        return replace(tiles, block_m=rows, block_n=keys, num_stages=1, registers=255)
    if dtype == torch.float32:
        if short and small and kv_dtype == dtype and (capability < 120 or head_dim <= 64):
            return Tiles(short_rows(group), 32, 0, 4 if head_dim <= 64 else 8, 2, 255)
        # one tile at a time: operands that are fetched ahead, or widened on the way, would spill
        return Tiles(short_rows(group) if short else max(32, pow2(group)), 16, 0, 8, 1, 255)
    if short:
        if not small:
            return Tiles(short_rows(group), 32, 0, 8, 5, 255)
        rows = short_rows(group)
        # small heads get fewer by themselves (too few from 120 on), more rows need more
        registers = (
            168 if head_dim > 64 and rows <= 32 else 128 if capability >= 120 and head_dim <= 64 else None
        )
        return Tiles(rows, 64 if capability else 32, 0, 4, 5, registers)
    rows = max(128 if small else 64, pow2(group))
    if not capability:
        return Tiles(rows, 32 if small else 16, 0, 4, 2)
    large = 90 <= capability < 120
    warps = 4 if head_dim <= 64 and capability // 10 != 9 else 8
    roomy = small or (rows == 64 and (large or capability == 80))
    return Tiles(rows, 64 if large else 32, 0, warps, 5 if roomy else 3, None if small else 255)


def matmul_tiles(dtype: torch.dtype, rows: int) -> Tiles:
    """Weight-only int8 and int4: three classes of row counts.

    Up to 16 rows (decode) the time is that of reading the weights: 3 tiles of 256 inputs are under way, and int4's
    scales, of which each thread then has two side by side, with them. Up to 64 rows the weights are still what is
    read most: narrow tiles, so that a matrix of 4096 outputs makes 128 programs and not 64. Beyond, a square one.
    """
    if dtype == torch.float32:
        return Tiles(16, 32, 64, 4, 2)
    if rows <= 16:
        return Tiles(16, 32, 256, 4, 5)
    return Tiles(64, 32, 128, 4, 4) if rows <= 64 else Tiles(64, 64, 64, 4, 3)
