/* Linear layers with int8 and int4 weights on the matrix unit (AMX): 8 x 8 bits with exact 32-bit sums.
 *
 * The 14 bits of an activation are two 7-bit halves, so two products of int8 tiles give the exact result.
 * int4 panels are expanded to int8, a few steps at a time, in the first-level cache.
 */
#include "linear_int4_expand.h"

#if PB_AMX
#include "threads.h"

enum {
    TILE_ROWS = 16,
    TILE_BYTES = 1024,
    PARTS = 2,
    BLOCK_TILES = 4,                    /* row tiles of one item */
    BLOCK_STEPS = 10,                   /* steps whose weights stay in the first-level cache: 30 KB */
    B_STEP_BYTES = INT_STEP * NR,
    A_STEP_BYTES = PARTS * TILE_BYTES,
};

typedef struct {
    linear_job linear;
    char *split;   /* activations: [row tile][step][low, high][16 rows][64] int8 */
    float *scales; /* one per row */
    int64_t steps;
    int int4;
} amx_int_job;

static void split_row(const void *context, int64_t row) {
    const amx_int_job *job = context;
    int64_t k = job->linear.k;
    const float *x = job->linear.x + row * k;
    char *out = job->split + row / TILE_ROWS * job->steps * A_STEP_BYTES + row % TILE_ROWS * 64;
    float inverse;
    job->scales[row] = row_scale(x, k, &inverse);
    for (int64_t i = 0; i < job->steps * INT_STEP; i += W) {
        vf v = i < k ? vload_n(x + i, k - i < W ? (int)(k - i) : W) : (vf){};
        vi q = vround(v * inverse);
        char *at = out + i / INT_STEP * A_STEP_BYTES + i % INT_STEP;
        _mm_storeu_si128((__m128i *)at, _mm512_cvtepi32_epi8((__m512i)(q & ((1 << LOW_BITS) - 1))));
        _mm_storeu_si128((__m128i *)(at + TILE_BYTES), _mm512_cvtepi32_epi8((__m512i)(q >> LOW_BITS)));
    }
}

/* Registers 0-2: sums of the low parts by three column tiles, 3-5: of the high parts, 6: weights, 7:
 * activations. */
static void configure(int rows) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = (uint8_t)(i == 6 ? 16 : rows);
    _tile_loadconfig(&config);
}

#define EACH_SUM(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define ZERO(i) _tile_zero(i);
#define LOAD(i) _tile_loadd(i, sums + i / 3 * TILE_ROWS * NR + i % 3 * 16, NR * 4);
#define STORE(i) _tile_stored(i, sums + i / 3 * TILE_ROWS * NR + i % 3 * 16, NR * 4);
#define LOW_HALF _tile_loadd(7, a, 64);
#define HIGH_HALF _tile_loadd(7, a + TILE_BYTES, 64);
#define WEIGHTS(column) _tile_loadd(6, b + 64 * column, NR * 4);
#define MULTIPLY(sum) _tile_dpbssd(sum, 7, 6);

/* Column v of one step, expanded. */
INLINE void expand_column(char *out, const char *groups, int v) {
#pragma GCC unroll 2
    for (int g = 0; g < INT_STEP / GROUP; g++, groups += INT4_GROUP_BYTES, out += GROUP * NR) {
        int4_column column = int4_load_column(groups, v);
#pragma GCC unroll 8
        for (int quad = 0; quad < GROUP / UNIT; quad++)
            _mm512_store_si512(out + (quad * NV + v) * 64, int4_expand(&column, groups, v, quad));
    }
}

/* sums [part][16][NR] of one row tile by one panel += some steps at b. Each step asks for ``lines`` cache lines
 * from ``next`` on, weights of later steps. int4 groups, if any, are expanded to b, each step while the one
 * before is multiplied, which keeps both the vector and the matrix unit at work. */
INLINE void multiply(const char *a, char *b, const char *groups, int64_t steps, int32_t *sums, int fresh,
                     const char *next, int64_t lines) {
    if (fresh) {
        EACH_SUM(ZERO)
    } else {
        EACH_SUM(LOAD)
    }
    if (groups)
        for (int v = 0; v < NV; v++) expand_column(b, groups, v);
    for (int64_t s = 0; s < steps; s++, a += A_STEP_BYTES, b += B_STEP_BYTES) {
        for (int64_t i = 0; i < lines; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        int more = groups && s + 1 < steps;
        if (more) {
            groups += INT_STEP / GROUP * INT4_GROUP_BYTES;
            expand_column(b + B_STEP_BYTES, groups, 0);
        }
        /* to and fro, so that each column begins with the half that the one before ended with */
        WEIGHTS(0) LOW_HALF MULTIPLY(0) HIGH_HALF MULTIPLY(3)
        if (more) expand_column(b + B_STEP_BYTES, groups, 1);
        WEIGHTS(1) MULTIPLY(4) LOW_HALF MULTIPLY(1)
        if (more) expand_column(b + B_STEP_BYTES, groups, 2);
        WEIGHTS(2) MULTIPLY(2) HIGH_HALF MULTIPLY(5)
    }
    EACH_SUM(STORE)
}

static void multiply_int8(const char *a, char *b, int64_t steps, int32_t *sums, int fresh, const char *next,
                          int64_t lines) {
    multiply(a, b, NULL, steps, sums, fresh, next, lines);
}

static void multiply_int4(const char *a, char *b, const char *groups, int64_t steps, int32_t *sums, int fresh,
                          const char *next, int64_t lines) {
    multiply(a, b, groups, steps, sums, fresh, next, lines);
}

/* Item: a block of row tiles by one panel. */
static void amx_int_item(const void *context, int64_t item) {
    const amx_int_job *job = context;
    const linear_job *l = &job->linear;
    int64_t panels = panels_of(l->n), panel = item % panels, first = item / panels * BLOCK_TILES;
    int64_t tiles = ceil_div(l->m, TILE_ROWS) - first, rows = l->m - first * TILE_ROWS;
    if (tiles > BLOCK_TILES) tiles = BLOCK_TILES, rows = BLOCK_TILES * TILE_ROWS;
    const char *panel_start = (const char *)l->weights + panel * int_panel_bytes(l->k, job->int4);
    const char *a = job->split + first * job->steps * A_STEP_BYTES;
    _Alignas(64) int32_t sums[BLOCK_TILES * PARTS * TILE_ROWS * NR];
    _Alignas(64) char expanded[BLOCK_STEPS * B_STEP_BYTES];
    configure(rows < TILE_ROWS ? (int)rows : TILE_ROWS);
    int64_t blocks = ceil_div(job->steps, BLOCK_STEPS);
    for (int64_t i = 0; i < blocks; i++) {
        int64_t s = job->steps * i / blocks, steps = job->steps * (i + 1) / blocks - s;
        const char *groups = panel_start + s * (INT_STEP / GROUP) * INT4_GROUP_BYTES;
        char *b = job->int4 ? expanded : (char *)panel_start + s * B_STEP_BYTES; /* written to only if expanded */
        /* all row tiles together ask for the weights of the block that comes next, a share in each step */
        int64_t step_bytes = job->int4 ? INT_STEP / GROUP * INT4_GROUP_BYTES : B_STEP_BYTES;
        int64_t lines = ceil_div(ceil_div(step_bytes, 64), tiles);
        const char *next = panel_start + s * step_bytes + (tiles == 1 ? 2 * step_bytes : steps * step_bytes);
        for (int64_t t = 0; t < tiles; t++, next += steps * lines * 64) {
            const char *rows_of_a = a + (t * job->steps + s) * A_STEP_BYTES;
            int32_t *tile_sums = sums + t * PARTS * TILE_ROWS * NR;
            if (i == blocks - 1)
                fetch_output(l, panel, (first + t) * TILE_ROWS, t == tiles - 1 ? rows - t * TILE_ROWS : TILE_ROWS);
            if (job->int4 && t == 0) multiply_int4(rows_of_a, b, groups, steps, tile_sums, s == 0, next, lines);
            else multiply_int8(rows_of_a, b, steps, tile_sums, s == 0, next, lines);
        }
    }
    _tile_release();
    for (int64_t r = 0; r < rows; r++) {
        const int32_t *low = sums + (r / TILE_ROWS * PARTS * TILE_ROWS + r % TILE_ROWS) * NR;
        int64_t row = first * TILE_ROWS + r;
        store_int_row(l, job->int4, panel, row, low, low + TILE_ROWS * NR, job->scales[row]);
    }
}

void pb_linear_int(const linear_job *linear, int int4) {
    if (linear->m <= (int4 ? FEW_ROWS : FEW_ROWS / 2)) { /* from there on the matrix unit is as fast */
        pb_linear_int_few(linear, int4);
        return;
    }
    int64_t tiles = ceil_div(linear->m, TILE_ROWS), steps = ceil_div(linear->k, INT_STEP);
    amx_int_job job = {*linear, pb_thread_memory(CALLER_MEMORY, tiles * (steps * A_STEP_BYTES + TILE_ROWS * 4)), NULL, steps, int4};
    job.scales = (float *)(job.split + tiles * steps * A_STEP_BYTES);
    pb_parallel(split_row, &job, linear->m, linear->m * linear->k < 1 << 16 ? 1 : linear->threads);
    pb_parallel(amx_int_item, &job, ceil_div(tiles, BLOCK_TILES) * panels_of(linear->n), linear->threads);
}
#endif
