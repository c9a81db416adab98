/* Linear layers with bf16 weights on the matrix unit (AMX), as exact as fp32 arithmetic.
 *
 * The unit multiplies bf16 by bf16 and adds in fp32. An fp32 activation is the sum of three bf16 numbers, exactly (8 bits
 * of its 24 each), so three products replace one and nothing but the order of the additions differs from fp32
 * multiply-adds; that order is fixed: steps of 32 k ascending, in each the low, the middle, then the high part. At three
 * products the unit is still several times faster than fused multiply-adds.
 *
 * A tile of activations is 16 rows x 32 k, one of weights 32 k x 16 outputs in pairs of k, which is how bf16 panels are
 * stored. A row's result depends neither on the other rows of its tile nor on their number.
 */
#include "linear_amx.h"

#if PB_AMX
#include "threads.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    TILE_ROWS = 16,
    STEP = 32,                              /* k of one tile */
    TILE_BYTES = 1024,
    PARTS = 3,
    COLUMN_TILES = NR / 16,
    BLOCK_TILES = 8,                        /* row tiles of one item */
    B_STEP_BYTES = STEP / 2 * NR * 4,       /* one step of a panel */
    A_STEP_BYTES = PARTS * TILE_BYTES,      /* one step of a row tile */
};
_Static_assert(COLUMN_TILES == 3, "the kernel below holds three column tiles");

/* The operating system gives the tile registers to a process that asks. */
int pb_amx_usable(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    static int usable; /* 0 unknown, 1 yes, -1 no; races write the same value */
    if (!usable) usable = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 1 : -1;
    return usable > 0;
}

typedef struct {
    linear_job linear;
    char *split; /* activations: [row tile][step][part][16 rows][32] bf16 */
    int64_t steps;
} amx_job;

/* Split 16 k of one row into its three parts, stored as the low halves would be: truncation keeps every remainder exact. */
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

/* Registers 0-5: sums of two row tiles by three column tiles, 6: weights, 7: activations. */
static void configure(int rows_first, int rows_second) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = TILE_ROWS;
    for (int i = 0; i < 3; i++) config.rows[i] = (uint8_t)rows_first, config.rows[3 + i] = (uint8_t)rows_second;
    config.rows[7] = (uint8_t)rows_first;
    _tile_loadconfig(&config);
}

INLINE void fetch_ahead(const char *b, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(b + i, _MM_HINT_T0);
}

/* One row tile (rows 1 .. 16) by one panel. */
static void one_by_three(const char *a, const char *b, int64_t steps, float *out, int fetch) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t s = 0; s < steps; s++, a += A_STEP_BYTES, b += B_STEP_BYTES) {
        if (fetch) fetch_ahead(b + 2 * B_STEP_BYTES, B_STEP_BYTES);
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
    _tile_stored(0, out, NR * 4);
    _tile_stored(1, out + 16, NR * 4);
    _tile_stored(2, out + 32, NR * 4);
}

/* Two full row tiles by one panel. */
static void two_by_three(const char *a, const char *a2, const char *b, int64_t steps, float *out) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
#define COLUMN(first, second) /* registers of the two sums of a column tile */ \
    _tile_loadd(6, b + 64 * first, NR * 4); \
    PART(first, second, 0) PART(first, second, 1) PART(first, second, 2)
#define PART(first, second, part) \
    _tile_loadd(7, a + part * TILE_BYTES, 64); \
    _tile_dpbf16ps(first, 7, 6); \
    _tile_loadd(7, a2 + part * TILE_BYTES, 64); \
    _tile_dpbf16ps(second, 7, 6);
    for (int64_t s = 0; s < steps; s++, a += A_STEP_BYTES, a2 += A_STEP_BYTES, b += B_STEP_BYTES) {
        COLUMN(0, 3)
        COLUMN(1, 4)
        COLUMN(2, 5)
    }
#undef COLUMN
#undef PART
    _tile_stored(0, out, NR * 4);
    _tile_stored(1, out + 16, NR * 4);
    _tile_stored(2, out + 32, NR * 4);
    out += TILE_ROWS * NR;
    _tile_stored(3, out, NR * 4);
    _tile_stored(4, out + 16, NR * 4);
    _tile_stored(5, out + 32, NR * 4);
}

/* Item: a block of row tiles by one panel. */
static void amx_item(const void *context, int64_t item) {
    const amx_job *job = context;
    const linear_job *l = &job->linear;
    int64_t panels = panels_of(l->n), panel = item % panels, tile = item / panels * BLOCK_TILES;
    int64_t tiles = ceil_div(l->m, TILE_ROWS), end = tile + BLOCK_TILES < tiles ? tile + BLOCK_TILES : tiles;
    const char *b = (const char *)l->weights + panel * job->steps * B_STEP_BYTES;
    const float *bias = l->bias ? l->bias + panel * NR : NULL;
    _Alignas(64) float sums[2 * TILE_ROWS * NR];
    int configured = 0, fetch = 1;
    while (tile < end) {
        int64_t row = tile * TILE_ROWS, rows = l->m - row;
        int count = rows >= 2 * TILE_ROWS && tile + 1 < end ? 2 : 1;
        if (rows > count * TILE_ROWS) rows = count * TILE_ROWS;
        int wanted = rows < TILE_ROWS ? (int)rows : TILE_ROWS;
        if (configured != wanted) configure(wanted, TILE_ROWS);
        configured = wanted;
        const char *a = job->split + tile * job->steps * A_STEP_BYTES;
        if (count == 2) two_by_three(a, a + job->steps * A_STEP_BYTES, b, job->steps, sums);
        else one_by_three(a, b, job->steps, sums, fetch);
        fetch = 0;
        for (int64_t r = 0; r < rows; r++) {
            vf acc[NV];
            for (int v = 0; v < NV; v++) acc[v] = vload(sums + r * NR + v * W);
            store_row(l->out + (row + r) * l->n + panel * NR, acc, bias, l->n - panel * NR);
        }
        tile += count;
    }
    _tile_release();
}

static char *split_memory(int64_t bytes) {
    static _Thread_local char *memory;
    static _Thread_local int64_t size;
    if (bytes > size) {
        free(memory);
        memory = aligned_alloc(64, (size_t)bytes);
        size = memory ? bytes : 0;
    }
    return memory;
}

void pb_linear_amx(const linear_job *linear) {
    int64_t tiles = ceil_div(linear->m, TILE_ROWS), steps = ceil_div(linear->k, STEP);
    amx_job job = {*linear, split_memory(tiles * steps * A_STEP_BYTES), steps};
    if (!job.split) abort();
    pb_parallel(split_tile, &job, tiles, linear->m * linear->k < 1 << 16 ? 1 : linear->threads);
    pb_parallel(amx_item, &job, ceil_div(tiles, BLOCK_TILES) * panels_of(linear->n), linear->threads);
}
#endif
