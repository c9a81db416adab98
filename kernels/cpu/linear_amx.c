/* Linear layers with bf16 weights on the matrix unit (AMX), as exact as fp32 arithmetic or less, as asked.
 *
 * The unit multiplies bf16 by bf16 and adds in fp32. An fp32 activation is the sum of three bf16 numbers,
 * exactly (8 bits of its 24 each), so three products replace one and nothing but the order of the additions
 * differs from fp32 multiply-adds; that order is fixed: steps of 32 k ascending, in each the low, the middle,
 * then the high part. At three products the unit is still several times faster than fused multiply-adds.
 * Two parts round an activation to 16 bits and one part to the 8 of bf16, for two products and for one.
 *
 * A tile of activations is 16 rows x 32 k, one of weights 32 k x 16 outputs in pairs of k, which is how bf16
 * panels are stored. A row's result depends neither on the other rows of its tile nor on their number.
 */
#include "linear_amx.h"

#if PB_AMX
#include "threads.h"

enum {
    TILE_ROWS = 16,
    STEP = 32,                              /* k of one tile */
    TILE_BYTES = 1024,
    MOST_PARTS = 3,
    COLUMN_TILES = NR / 16,
    BLOCK_TILES = 8,                        /* row tiles of one item */
    BLOCK_STEPS = 10,                       /* steps whose weights stay in the first-level cache: 30 KB */
    B_STEP_BYTES = STEP / 2 * NR * 4,       /* one step of a panel */
    FETCH_AHEAD = 2 * B_STEP_BYTES,
};
_Static_assert(COLUMN_TILES == 3, "the kernel below holds three column tiles");

typedef struct {
    linear_job linear;
    char *split; /* activations: [row tile][step][part][16 rows][32] bf16 */
    int64_t steps;
} amx_job;

/* One step of a row tile. */
INLINE int64_t a_step_bytes(int64_t parts) { return parts * TILE_BYTES; }

/* Split 16 k of one row into its parts, stored as the low halves would be: truncation keeps every remainder
 * exact. The last of fewer than three parts is rounded to nearest even. */
INLINE void split_16(__m512 x, char *out, int parts) {
    const __m512i high_half = _mm512_set1_epi32((int32_t)0xffff0000);
#pragma GCC unroll 3
    for (int part = parts - 1; part >= 0; part--) {
        __m512i top = _mm512_castps_si512(x);
        if (part == 0 && parts < MOST_PARTS) {
            __m512i odd = _mm512_and_si512(_mm512_srli_epi32(top, 16), _mm512_set1_epi32(1));
            __m512i rounded = _mm512_add_epi32(top, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            __mmask16 number = (__mmask16)~_mm512_fpclass_ps_mask(x, 0x81); /* a NaN stays one */
            top = _mm512_mask_mov_epi32(top, number, rounded);
        }
        top = _mm512_and_si512(top, high_half);
        _mm256_storeu_si256((__m256i *)(out + part * TILE_BYTES), _mm512_cvtepi32_epi16(_mm512_srli_epi32(top, 16)));
        __mmask16 finite = (__mmask16)~_mm512_fpclass_ps_mask(x, 0x99); /* infinity and NaN have no remainder */
        x = _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(top));
    }
}

INLINE void split_tile(const amx_job *job, int64_t tile, int parts) {
    int64_t k = job->linear.k, first = tile * TILE_ROWS, rows = job->linear.m - first;
    if (rows > TILE_ROWS) rows = TILE_ROWS;
    for (int64_t r = 0; r < rows; r++) {
        const float *x = job->linear.x + (first + r) * k;
        char *out = job->split + tile * job->steps * a_step_bytes(parts) + r * 64;
        for (int64_t i = 0; i < job->steps * STEP; i += 16) {
            int64_t left = k - i;
            vf part = left >= W ? vload(x + i) : left > 0 ? vload_n(x + i, (int)left) : (vf){};
            split_16((__m512)part, out + i / STEP * a_step_bytes(parts) + i % STEP * 2, parts);
        }
    }
}

/* Registers 0-2: sums of a row tile of ``rows`` rows by three column tiles, 3-5: weights, 7: activations. */
static void configure(int rows) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = (uint8_t)(i >= 3 && i <= 5 ? STEP / 2 : rows);
    }
    _tile_loadconfig(&config);
}

/* sums [rows][NR] of one row tile by one panel += some steps. Each step asks for ``lines`` cache lines from
 * ``next`` on, weights of later steps. */
INLINE void multiply(const char *a, const char *b, int64_t steps, float *sums, int fresh, const char *next,
                     int64_t lines, int parts) {
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
    } else {
        _tile_loadd(0, sums, NR * 4);
        _tile_loadd(1, sums + 16, NR * 4);
        _tile_loadd(2, sums + 32, NR * 4);
    }
    for (int64_t s = 0; s < steps; s++, a += a_step_bytes(parts), b += B_STEP_BYTES) {
        for (int64_t i = 0; i < lines; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        _tile_loadd(3, b, NR * 4);
        _tile_loadd(4, b + 64, NR * 4);
        _tile_loadd(5, b + 128, NR * 4);
#pragma GCC unroll 3
        for (int part = 0; part < parts; part++) {
            _tile_loadd(7, a + part * TILE_BYTES, 64);
            _tile_dpbf16ps(0, 7, 3);
            _tile_dpbf16ps(1, 7, 4);
            _tile_dpbf16ps(2, 7, 5);
        }
    }
    _tile_stored(0, sums, NR * 4);
    _tile_stored(1, sums + 16, NR * 4);
    _tile_stored(2, sums + 32, NR * 4);
}

/* Item: a block of row tiles by one panel. Weights of a few steps stay in the first-level cache for all the
 * rows. */
INLINE void amx_item(const amx_job *job, int64_t item, int parts) {
    const linear_job *l = &job->linear;
    int64_t panels = panels_of(l->n), panel = item % panels, first = item / panels * BLOCK_TILES;
    int64_t tiles = ceil_div(l->m, TILE_ROWS) - first, rows = l->m - first * TILE_ROWS;
    if (tiles > BLOCK_TILES) tiles = BLOCK_TILES, rows = BLOCK_TILES * TILE_ROWS;
    const char *b = (const char *)l->weights + panel * job->steps * B_STEP_BYTES;
    const char *a = job->split + first * job->steps * a_step_bytes(parts);
    _Alignas(64) float sums[BLOCK_TILES * TILE_ROWS * NR];
    configure(rows < TILE_ROWS ? (int)rows : TILE_ROWS); /* the last tile of several computes unused rows */
    int64_t blocks = tiles == 1 ? 1 : ceil_div(job->steps, BLOCK_STEPS);
    for (int64_t i = 0; i < blocks; i++) {
        int64_t s = job->steps * i / blocks, steps = job->steps * (i + 1) / blocks - s;
        /* all row tiles together ask for the weights of the block that comes next, a share in each step */
        int64_t lines = ceil_div(B_STEP_BYTES / 64, tiles), ahead = tiles == 1 ? FETCH_AHEAD : steps * B_STEP_BYTES;
        for (int64_t t = 0; t < tiles; t++) {
            if (i == blocks - 1)
                fetch_output(l, panel, (first + t) * TILE_ROWS, t == tiles - 1 ? rows - t * TILE_ROWS : TILE_ROWS);
            multiply(a + (t * job->steps + s) * a_step_bytes(parts), b + s * B_STEP_BYTES, steps,
                     sums + t * TILE_ROWS * NR, s == 0, b + s * B_STEP_BYTES + ahead + t * steps * lines * 64, lines,
                     parts);
        }
    }
    _tile_release();
    store_panel(l, panel, first * TILE_ROWS, rows, sums);
}

#define FOR_PARTS(parts) \
    static void split_tile_##parts(const void *job, int64_t tile) { split_tile(job, tile, parts); } \
    static void amx_item_##parts(const void *job, int64_t item) { amx_item(job, item, parts); }
FOR_PARTS(1)
FOR_PARTS(2)
FOR_PARTS(3)

void pb_linear_amx(const linear_job *linear, int parts) {
    typedef void work(const void *, int64_t);
    static work *const splits[MOST_PARTS] = {split_tile_1, split_tile_2, split_tile_3};
    static work *const items[MOST_PARTS] = {amx_item_1, amx_item_2, amx_item_3};
    int64_t tiles = ceil_div(linear->m, TILE_ROWS), steps = ceil_div(linear->k, STEP);
    amx_job job = {*linear, pb_thread_memory(CALLER_MEMORY, tiles * steps * a_step_bytes(parts)), steps};
    pb_parallel(splits[parts - 1], &job, tiles, linear->m * linear->k < 1 << 16 ? 1 : linear->threads);
    pb_parallel(items[parts - 1], &job, ceil_div(tiles, BLOCK_TILES) * panels_of(linear->n), linear->threads);
}
#endif
