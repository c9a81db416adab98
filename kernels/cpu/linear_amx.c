/* Linear layers with bf16 weights on the matrix unit (AMX), as exact as fp32 arithmetic.
 *
 * The unit multiplies bf16 by bf16 and adds in fp32. An fp32 activation is the sum of three bf16 numbers,
 * exactly (8 bits of its 24 each), so three products replace one and nothing but the order of the additions
 * differs from fp32 multiply-adds; that order is fixed: steps of 32 k ascending, in each the low, the middle,
 * then the high part. At three products the unit is still several times faster than fused multiply-adds.
 *
 * A tile of activations is 16 rows x 32 k, one of weights 32 k x 16 outputs in pairs of k, which is how bf16
 * panels are stored. A row's result depends neither on the other rows of its tile nor on their number.
 */
#include "linear_amx.h"

#if PB_AMX
#include "threads.h"

#include <sys/syscall.h>
#include <unistd.h>

enum {
    TILE_ROWS = 16,
    STEP = 32,                              /* k of one tile */
    TILE_BYTES = 1024,
    PARTS = 3,
    COLUMN_TILES = NR / 16,
    BLOCK_TILES = 8,                        /* row tiles of one item */
    BLOCK_STEPS = 10,                       /* steps whose weights stay in the first-level cache: 30 KB */
    B_STEP_BYTES = STEP / 2 * NR * 4,       /* one step of a panel */
    A_STEP_BYTES = PARTS * TILE_BYTES,      /* one step of a row tile */
    FETCH_AHEAD = 2 * B_STEP_BYTES,
};
_Static_assert(COLUMN_TILES == 3, "the kernel below holds three column tiles");

/* The operating system gives the tile registers to a process that asks. */
int pb_amx_usable(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

typedef struct {
    linear_job linear;
    char *split; /* activations: [row tile][step][part][16 rows][32] bf16 */
    int64_t steps;
} amx_job;

/* Split 16 k of one row into its three parts, stored as the low halves would be: truncation keeps every
 * remainder exact. */
INLINE void split_16(__m512 x, char *out) {
    const __m512i high_half = _mm512_set1_epi32((int32_t)0xffff0000);
#pragma GCC unroll 3
    for (int part = PARTS - 1; part >= 0; part--) {
        __m512i top = _mm512_and_si512(_mm512_castps_si512(x), high_half);
        _mm256_storeu_si256((__m256i *)(out + part * TILE_BYTES), _mm512_cvtepi32_epi16(_mm512_srli_epi32(top, 16)));
        __mmask16 finite = (__mmask16)~_mm512_fpclass_ps_mask(x, 0x99); /* infinity and NaN have no remainder */
        x = _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(top));
    }
}

static void split_tile(const void *context, int64_t tile) {
    const amx_job *job = context;
    int64_t k = job->linear.k, first = tile * TILE_ROWS, rows = job->linear.m - first;
    if (rows > TILE_ROWS) rows = TILE_ROWS;
    for (int64_t r = 0; r < rows; r++) {
        const float *x = job->linear.x + (first + r) * k;
        char *out = job->split + tile * job->steps * A_STEP_BYTES + r * 64;
        for (int64_t i = 0; i < job->steps * STEP; i += 16) {
            int64_t left = k - i;
            vf part = left >= W ? vload(x + i) : left > 0 ? vload_n(x + i, (int)left) : (vf){};
            split_16((__m512)part, out + i / STEP * A_STEP_BYTES + i % STEP * 2);
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

/* sums [rows][NR] of one row tile by one panel += some steps. The first row tile fetches the weights of later
 * steps. */
static void multiply(const char *a, const char *b, int64_t steps, float *sums, int fresh, int fetch) {
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
    } else {
        _tile_loadd(0, sums, NR * 4);
        _tile_loadd(1, sums + 16, NR * 4);
        _tile_loadd(2, sums + 32, NR * 4);
    }
    for (int64_t s = 0; s < steps; s++, a += A_STEP_BYTES, b += B_STEP_BYTES) {
        if (fetch)
            for (int64_t i = 0; i < B_STEP_BYTES; i += 64) _mm_prefetch(b + FETCH_AHEAD + i, _MM_HINT_T0);
        _tile_loadd(3, b, NR * 4);
        _tile_loadd(4, b + 64, NR * 4);
        _tile_loadd(5, b + 128, NR * 4);
#pragma GCC unroll 3
        for (int part = 0; part < PARTS; part++) {
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
static void amx_item(const void *context, int64_t item) {
    const amx_job *job = context;
    const linear_job *l = &job->linear;
    int64_t panels = panels_of(l->n), panel = item % panels, first = item / panels * BLOCK_TILES;
    int64_t tiles = ceil_div(l->m, TILE_ROWS) - first, rows = l->m - first * TILE_ROWS;
    if (tiles > BLOCK_TILES) tiles = BLOCK_TILES, rows = BLOCK_TILES * TILE_ROWS;
    const char *b = (const char *)l->weights + panel * job->steps * B_STEP_BYTES;
    const char *a = job->split + first * job->steps * A_STEP_BYTES;
    _Alignas(64) float sums[BLOCK_TILES * TILE_ROWS * NR];
    configure(rows < TILE_ROWS ? (int)rows : TILE_ROWS); /* the last tile of several computes unused rows */
    int64_t blocks = tiles == 1 ? 1 : ceil_div(job->steps, BLOCK_STEPS);
    for (int64_t i = 0; i < blocks; i++) {
        int64_t s = job->steps * i / blocks, steps = job->steps * (i + 1) / blocks - s;
        for (int64_t t = 0; t < tiles; t++)
            multiply(a + (t * job->steps + s) * A_STEP_BYTES, b + s * B_STEP_BYTES, steps, sums + t * TILE_ROWS * NR,
                     s == 0, t == 0);
    }
    _tile_release();
    store_panel(l, panel, first * TILE_ROWS, rows, sums);
}

void pb_linear_amx(const linear_job *linear) {
    int64_t tiles = ceil_div(linear->m, TILE_ROWS), steps = ceil_div(linear->k, STEP);
    amx_job job = {*linear, pb_thread_memory(CALLER_MEMORY, tiles * steps * A_STEP_BYTES), steps};
    pb_parallel(split_tile, &job, tiles, linear->m * linear->k < 1 << 16 ? 1 : linear->threads);
    pb_parallel(amx_item, &job, ceil_div(tiles, BLOCK_TILES) * panels_of(linear->n), linear->threads);
}
#endif
