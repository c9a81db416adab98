/* Linear layers with int8 and int4 weights: products on vector units.
 *
 * Products are 16 x 16 bits with exact 32-bit sums (vpdpwssd, vpmaddwd). int8 weights are widened in registers. int4
 * weights are too where the rows fit in one tile; for more rows a block of K of one panel is expanded to 16 bits in the
 * first-level cache, where all of them use it. A block's integer sums are added to fp32 totals. Blocks have fixed
 * bounds and integer sums are exact in any order, so a row's result depends on nothing but the row.
 */
#include "int_dot.h"
#include "linear_int.h"
#include "threads.h"

#if !PB_AMX
enum {
    K_BLOCK = 512,       /* 8191 * 127 * 512 < 2^31 */
    INT_ROWS = 16 * MR,
    MOST_PARTS = 4,
    FETCH_AHEAD = 4096,  /* bytes; more than the hardware looks ahead */
};

/* Sums that a tile of few rows keeps per output: one sum alone would wait for each product before the next. */
#define PARTS(rows) ((rows) > 2 ? 1 : MOST_PARTS / (rows))

/* 2 W bytes, signed or not, as 16-bit numbers; by intrinsics for the reason that vload_u16 has. */
INLINE vs widen(const void *p) {
#if PB_AVX512
    return (vs)_mm512_cvtepi8_epi16(_mm256_loadu_si256(p));
#elif PB_AVX2
    return (vs)_mm256_cvtepi8_epi16(_mm_loadu_si128(p));
#elif PB_NEON
    return (vs)vmovl_s8(vld1_s8(p));
#else
    int8_t __attribute__((vector_size(W * 2))) bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vs);
#endif
}

INLINE vu widen_unsigned(const void *p) {
#if PB_AVX512
    return (vu)_mm512_cvtepu8_epi16(_mm256_loadu_si256(p));
#elif PB_AVX2
    return (vu)_mm256_cvtepu8_epi16(_mm_loadu_si128(p));
#elif PB_NEON
    return (vu)vmovl_u8(vld1_u8(p));
#else
    uint8_t __attribute__((vector_size(W * 2))) bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vu);
#endif
}

/* W 16-bit numbers, each twice. */
INLINE vu twice(const void *p) {
    vi wide = vload_u16(p);
    return (vu)(wide | wide << 16);
}

/* Steps and offsets of one vector of outputs of a group. */
typedef struct {
    vu step, offset;
} pair_column;

INLINE pair_column load_pair_column(const char *group, int v) {
    return (pair_column){twice(group + v * W * 2), twice(group + NR * 2 + v * W * 2)};
}

/* Four k of W outputs of a group, as two vectors of pairs. Modulo 2^16; the sum is in range. */
INLINE void expand_pairs(vs out[2], const pair_column *column, const char *group, int v, int quad) {
    vu both = widen_unsigned(group + GROUP_PARAMETERS + (quad * NV + v) * 2 * W);
    out[0] = (vs)((both & 15) * column->step + column->offset) >> INT4_SHIFT;
    out[1] = (vs)((both >> 4) * column->step + column->offset) >> INT4_SHIFT;
}

INLINE void add_sums(float *totals, vi sums) {
    vstore(totals, vload(totals) + __builtin_convertvector(sums, vf));
}

/* totals [rows][NR] += q [rows][ldq] times the numbers w of some pairs: int8 as in a panel, or 16 bits ("wide"). */
INLINE void int_tile(const int16_t *q, int64_t ldq, const char *w, int64_t pairs, float *totals, int rows, int wide) {
    const int parts = PARTS(rows), bytes = wide ? 4 * NR : 2 * NR;
    vi acc[MOST_PARTS][MR][NV];
    memset(acc, 0, sizeof acc);
    for (int64_t p = 0; p < pairs; p += parts)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++, w += bytes, q += 2) {
            if (!wide) __builtin_prefetch(w + FETCH_AHEAD);
            vi b[NV];
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) b[v] = wide ? viload(w + v * 4 * W) : (vi)widen(w + v * 2 * W);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vi a = pair_of(q + r * ldq);
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) acc[part][r][v] = vdot(acc[part][r][v], a, b[v]);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            vi sum = acc[0][r][v];
#pragma GCC unroll 4
            for (int part = 1; part < parts; part++) sum += acc[part][r][v];
            add_sums(totals + r * NR + v * W, sum);
        }
}

/* The same with int4 groups. One column after the other, as the registers do not hold more. */
INLINE void int4_tile(const int16_t *q, int64_t ldq, const char *groups, int64_t pairs, float *totals, int rows) {
    const int parts = PARTS(rows);
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
        vi acc[MOST_PARTS][MR];
        memset(acc, 0, sizeof acc);
        const char *group = groups;
        const int16_t *x = q;
        for (int64_t g = 0; g < pairs * 2 / GROUP; g++, group += INT4_GROUP_BYTES) {
            for (int i = 0; v == 0 && i < INT4_GROUP_BYTES; i += 64) __builtin_prefetch(group + i + FETCH_AHEAD);
            pair_column column = load_pair_column(group, v);
#pragma GCC unroll 8
            for (int quad = 0; quad < GROUP / 4; quad++, x += 4) {
                vs b[2];
                expand_pairs(b, &column, group, v, quad);
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        vi *sum = &acc[(quad * 2 + half) % parts][r];
                        *sum = vdot(*sum, pair_of(x + r * ldq + half * 2), (vi)b[half]);
                    }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vi sum = acc[0][r];
#pragma GCC unroll 4
            for (int part = 1; part < parts; part++) sum += acc[part][r];
            add_sums(totals + r * NR + v * W, sum);
        }
    }
}

/* out [k / 2][NR] pairs = some groups, expanded. */
static void expand_block(int16_t *out, const char *group, int64_t groups) {
    for (int64_t g = 0; g < groups; g++, out += GROUP * NR, group += INT4_GROUP_BYTES)
        for (int v = 0; v < NV; v++) {
            pair_column column = load_pair_column(group, v);
            for (int quad = 0; quad < GROUP / 4; quad++) {
                vs pairs[2];
                expand_pairs(pairs, &column, group, v, quad);
                memcpy(out + (quad * 2 * NR + v * W) * 2, &pairs[0], sizeof pairs[0]);
                memcpy(out + ((quad * 2 + 1) * NR + v * W) * 2, &pairs[1], sizeof pairs[1]);
            }
        }
}

/* The tile of each number of rows, for weights as in an int8 panel, for wide ones and for int4 groups. */
typedef void tile_function(const int16_t *q, int64_t ldq, const char *w, int64_t pairs, float *totals);
#define TILE(rows) \
    static void int8_tile_##rows(const int16_t *q, int64_t ldq, const char *w, int64_t pairs, float *totals) { \
        int_tile(q, ldq, w, pairs, totals, rows, 0); \
    } \
    static void wide_tile_##rows(const int16_t *q, int64_t ldq, const char *w, int64_t pairs, float *totals) { \
        int_tile(q, ldq, w, pairs, totals, rows, 1); \
    } \
    static void int4_tile_##rows(const int16_t *q, int64_t ldq, const char *w, int64_t pairs, float *totals) { \
        int4_tile(q, ldq, w, pairs, totals, rows); \
    }
#if MR >= 8
#define EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#elif MR >= 6
#define EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
#define EACH_ROWS(X) X(1) X(2) X(3) X(4)
#endif
EACH_ROWS(TILE)
#define INT8_TILE(rows) int8_tile_##rows,
#define WIDE_TILE(rows) wide_tile_##rows,
#define INT4_TILE(rows) int4_tile_##rows,
static tile_function *const int8_tiles[MR] = {EACH_ROWS(INT8_TILE)}, *const wide_tiles[MR] = {EACH_ROWS(WIDE_TILE)},
                     *const int4_tiles[MR] = {EACH_ROWS(INT4_TILE)};

typedef struct {
    linear_job linear;
    int16_t *q;    /* [M][padded k] */
    float *scales; /* [M] */
    int int4;
} int_job;

static void quantize_row(const void *context, int64_t row) {
    const int_job *job = context;
    int64_t k = job->linear.k, padded = int_padded_k(k);
    const float *x = job->linear.x + row * k;
    int16_t *q = job->q + row * padded;
    float inverse;
    job->scales[row] = row_scale(x, k, &inverse);
    for (int64_t i = 0; i < padded; i += W) {
        vf v = i < k ? vload_n(x + i, k - i < W ? (int)(k - i) : W) : (vf){};
        vi rounded = vround(v * inverse);
        for (int j = 0; j < W; j++) q[i + j] = (int16_t)rounded[j];
    }
}

/* Item: a block of rows by one panel. */
static void int_item(const void *context, int64_t item) {
    const int_job *job = context;
    const linear_job *l = &job->linear;
    int64_t panels = panels_of(l->n), panel = item % panels, first = item / panels * INT_ROWS;
    int64_t rows = l->m - first < INT_ROWS ? l->m - first : INT_ROWS, padded = int_padded_k(l->k);
    const char *w = (const char *)l->weights + panel * int_panel_bytes(l->k, job->int4);
    const float *scales = int_scales(l->weights, l->n, l->k, job->int4) + panel * NR;
    _Alignas(64) int16_t wide[K_BLOCK * NR];
    _Alignas(64) float totals[INT_ROWS * NR];
    memset(totals, 0, sizeof(float) * (size_t)(rows * NR));
    int64_t tiles = ceil_div(rows, MR);
    for (int64_t k = 0; k < padded; k += K_BLOCK) {
        int64_t count = padded - k < K_BLOCK ? padded - k : K_BLOCK;
        const char *block = job->int4 ? w + k / GROUP * INT4_GROUP_BYTES : w + k * NR;
        tile_function *const *of_rows = job->int4 ? int4_tiles : int8_tiles;
        if (job->int4 && tiles > 1) {
            expand_block(wide, block, count / GROUP);
            block = (const char *)wide, of_rows = wide_tiles;
        }
        for (int64_t i = 0; i < tiles; i++) {
            int64_t from = rows * i / tiles, to = rows * (i + 1) / tiles;
            of_rows[to - from - 1](job->q + (first + from) * padded + k, padded, block, count / 2, totals + from * NR);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        vf acc[NV];
        for (int v = 0; v < NV; v++)
            acc[v] = vload(totals + r * NR + v * W) * (vload(scales + v * W) * job->scales[first + r]);
        store_row(l->out + (first + r) * l->n + panel * NR, acc, l->bias ? l->bias + panel * NR : NULL,
                  l->n - panel * NR);
    }
}

void pb_linear_int(const linear_job *linear, int int4) {
    int64_t padded = int_padded_k(linear->k);
    int_job job = {*linear, pb_thread_memory(CALLER_MEMORY, linear->m * (2 * padded + 4)), NULL, int4};
    job.scales = (float *)(job.q + linear->m * padded);
    pb_parallel(quantize_row, &job, linear->m, linear->m * linear->k < 1 << 16 ? 1 : linear->threads);
    pb_parallel(int_item, &job, ceil_div(linear->m, INT_ROWS) * panels_of(linear->n), linear->threads);
}
#endif
