/* Register tiles of attention: up to TILE_ROWS rows against the sub-blocks of one key tile.
 *
 * Chains run over d for scores and over tokens for values, one per element, whatever is computed side by
 * side.
 */
#ifndef PB_ATTENTION_TILE_H
#define PB_ATTENTION_TILE_H

#include "panels.h"

enum {
    SUB = 16,     /* tokens of a sub-block */
    SUBS = 4,     /* sub-blocks of a key tile */
    KEYS = SUB * SUBS,
    VS = SUB / W, /* vectors of a sub-block */
    TILE_ROWS = MR < 6 ? MR : 6,
};

/* The key tile at hand: where its sub-blocks are. V is fetched ahead while scores are computed, the next
 * tile's K (``ahead``, or NULL) while values are: blocks lie anywhere, so the hardware's own prefetcher
 * starts anew in each. */
typedef struct {
    const char *k[SUBS], *v[SUBS], *ahead[SUBS];
    const float *k_scale; /* [KEYS], of scores; NULL unless the cache is of codes */
    int64_t k_stride;     /* elements from one d to the next */
    int subs, first, last; /* sub-blocks; tokens [first, last) are read */
    int fetch, size;      /* fetch ahead: only the first rows do; bytes of an element: float, bf16 or int8 */
} key_tile;

/* n (1 .. W) elements of K or V from element ``at`` on. */
INLINE vf load_kv(const char *p, int64_t at, int n, int size) {
    if (size == 1) {
        if (n == W) return vload_bytes(p + at, 1);
        char part[W] = {};
        memcpy(part, p + at, (size_t)n);
        return vload_bytes(part, 1);
    }
    if (size == 2) return vload_bf16_n((const uint16_t *)p + at, n);
    return n < W ? vload_n((const float *)p + at, n) : vload((const float *)p + at);
}

/* score[rows][subs * SUB] = q . k for sub-blocks ``sub`` .. ``sub + subs - 1``. */
INLINE void scores(const float *q, float (*score)[KEYS], const key_tile *t, int64_t d, int sub, int rows, int subs,
                   int size) {
    vf acc[TILE_ROWS][SUBS * VS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < subs * VS; v++) acc[r][v] = (vf){};
    const char *k[SUBS];
#pragma GCC unroll 4
    for (int s = 0; s < subs; s++) k[s] = t->k[sub + s];
    for (int64_t i = 0; i < d; i++) {
        vf b[SUBS * VS];
#pragma GCC unroll 4
        for (int s = 0; s < subs; s++) {
#pragma GCC unroll 4
            for (int v = 0; v < VS; v++) b[s * VS + v] = load_kv(k[s], v * W, W, size);
            k[s] += t->k_stride * size;
            if (t->fetch && (size > 1 || i % 4 == 0)) __builtin_prefetch(t->v[sub + s] + i * SUB * size);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vf a = vset1(q[r * d + i]);
#pragma GCC unroll 16
            for (int v = 0; v < subs * VS; v++) acc[r][v] = vfma(a, b[v], acc[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < subs * VS; v++) {
            int at = (sub * VS + v) * W;
            vstore(&score[r][at], t->k_scale ? acc[r][v] * vload(t->k_scale + at) : acc[r][v]);
        }
}

/* out[rows][vectors * W] = out * rescale + weights @ V; the last vector holds ``lanes`` elements. */
INLINE void weighted_values(float *out, float (*weight)[KEYS], const float *rescale, const key_tile *t, int64_t d,
                            int64_t column, int rows, int vectors, int lanes, int size) {
    vf acc[TILE_ROWS][8];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            const float *at = out + r * d + column + v * W;
            acc[r][v] = (lanes < W ? vload_n(at, lanes) : vload(at)) * vset1(rescale[r]);
        }
    for (int64_t from = 0; from < t->last; from += SUB) {
        const char *base = t->v[from / SUB] + column * size, *ahead = t->fetch ? t->ahead[from / SUB] : NULL;
        int64_t first = from > t->first ? from : t->first, last = from + SUB < t->last ? from + SUB : t->last;
        for (int64_t j = first; j < last; j++) {
            const char *value = base + (j - from) * d * size;
            vf b[8];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) b[v] = load_kv(value, v * W, lanes, size);
            if (ahead) { /* a token's share of the SUB * d elements of K, spread over the column passes */
                const char *next = ahead + ((j - from) * d + column) * size;
#pragma GCC unroll 8
                for (int v = 0; v < (vectors * W * size + 63) / 64; v++) __builtin_prefetch(next + v * 64);
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vf a = vset1(weight[r][j]);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) acc[r][v] = vfma(a, b[v], acc[r][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            float *at = out + r * d + column + v * W;
            if (lanes < W) vstore_n(at, acc[r][v], lanes);
            else vstore(at, acc[r][v]);
        }
}

/* Sub-blocks and columns taken at once, so that accumulators fill the registers and short tiles still have
 * enough chains. */
#if PB_AVX512
#define SUBS_OF(rows) 4
#define VECTORS_OF(rows) 4
#elif PB_AVX2
#define SUBS_OF(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#define VECTORS_OF(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)
#elif PB_NEON
#define SUBS_OF(rows) ((rows) <= 3 ? 2 : 1)
#define VECTORS_OF(rows) ((rows) <= 3 ? 8 : 4)
#else
#define SUBS_OF(rows) 1
#define VECTORS_OF(rows) 2
#endif

INLINE void score_rows(const float *q, float (*score)[KEYS], const key_tile *t, int64_t d, int rows, int size) {
    int sub = 0, step = SUBS_OF(rows);
    for (; sub + step <= t->subs; sub += step) scores(q, score, t, d, sub, rows, step, size);
    for (; sub < t->subs; sub++) scores(q, score, t, d, sub, rows, 1, size);
}

INLINE void value_rows(float *out, float (*weight)[KEYS], const float *rescale, const key_tile *t, int64_t d, int rows,
                       int size) {
    int64_t column = 0;
    int step = VECTORS_OF(rows);
    for (; column + step * W <= d; column += step * W)
        weighted_values(out, weight, rescale, t, d, column, rows, step, W, size);
    for (; column + W <= d; column += W) weighted_values(out, weight, rescale, t, d, column, rows, 1, W, size);
    if (column < d) weighted_values(out, weight, rescale, t, d, column, rows, 1, (int)(d - column), size);
}

#define ROW_CASES(call) \
    switch (rows) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 5: call(5); break; \
    default: call(6); \
    }
#if MR < 6
#undef ROW_CASES
#define ROW_CASES(call) \
    switch (rows) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    default: call(4); \
    }
#endif

static void score_tile(const float *q, float (*score)[KEYS], const key_tile *t, int64_t d, int rows) {
#define CALL(n) score_rows(q, score, t, d, n, 4)
#define CALL_BF16(n) score_rows(q, score, t, d, n, 2)
#define CALL_INT8(n) score_rows(q, score, t, d, n, 1)
    if (t->size == 1) ROW_CASES(CALL_INT8)
    else if (t->size == 2) ROW_CASES(CALL_BF16)
    else ROW_CASES(CALL)
#undef CALL
#undef CALL_BF16
#undef CALL_INT8
}

static void value_tile(float *out, float (*weight)[KEYS], const float *rescale, const key_tile *t, int64_t d,
                       int rows) {
#define CALL(n) value_rows(out, weight, rescale, t, d, n, 4)
#define CALL_BF16(n) value_rows(out, weight, rescale, t, d, n, 2)
#define CALL_INT8(n) value_rows(out, weight, rescale, t, d, n, 1)
    if (t->size == 1) ROW_CASES(CALL_INT8)
    else if (t->size == 2) ROW_CASES(CALL_BF16)
    else ROW_CASES(CALL)
#undef CALL
#undef CALL_BF16
#undef CALL_INT8
}

#endif
