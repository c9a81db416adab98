/* Linear layers with int8 and int4 weights for a few rows, where reading the weights is the work and the matrix
 * unit only adds to it.
 *
 * Byte products of vector units (vpdpbusd: unsigned x signed) on the matrix unit's panels. The high half of an
 * activation is -64 .. 63; 64 is added to make it unsigned, and 64 times the sum of the weights, which every
 * row shares, is taken off again. All sums are exact, so the results are those of the matrix unit.
 */
#include "linear_int4_expand.h"

#if PB_AMX
#include "threads.h"

enum {
    HIGH_OFFSET = 64,
    FETCH_AHEAD = 6144, /* bytes; a few kilobytes more than the hardware looks ahead */
};

typedef struct {
    linear_job linear;
    uint8_t *split; /* activations: [row][low, high + HIGH_OFFSET][padded k] */
    float scales[FEW_ROWS];
    int int4;
} few_job;

static void split_few(few_job *job, int64_t row) {
    int64_t k = job->linear.k, padded = int_padded_k(k);
    const float *x = job->linear.x + row * k;
    uint8_t *low = job->split + row * 2 * padded, *high = low + padded;
    float inverse;
    job->scales[row] = row_scale(x, k, &inverse);
    for (int64_t i = 0; i < padded; i += W) {
        vf v = i < k ? vload_n(x + i, k - i < W ? (int)(k - i) : W) : (vf){};
        vi q = vround(v * inverse);
        _mm_storeu_si128((__m128i *)(low + i), _mm512_cvtepi32_epi8((__m512i)(q & ((1 << LOW_BITS) - 1))));
        _mm_storeu_si128((__m128i *)(high + i), _mm512_cvtepi32_epi8((__m512i)((q >> LOW_BITS) + HIGH_OFFSET)));
    }
}

INLINE __m512i four(const uint8_t *p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return _mm512_set1_epi32(bytes);
}

/* Sums of one column of 16 outputs: of the weights, and per row over the low and the high halves. */
typedef struct {
    __m512i weights, low[FEW_ROWS], high[FEW_ROWS];
} few_sums;

INLINE void few_add(few_sums *sums, __m512i w, const uint8_t *x, int64_t padded, int rows) {
    sums->weights = _mm512_dpbusd_epi32(sums->weights, _mm512_set1_epi8(1), w);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        sums->low[r] = _mm512_dpbusd_epi32(sums->low[r], four(x + r * 2 * padded), w);
        sums->high[r] = _mm512_dpbusd_epi32(sums->high[r], four(x + (r * 2 + 1) * padded), w);
    }
}

INLINE void few_panel(const few_job *job, int64_t panel, int rows, int int4) {
    const linear_job *l = &job->linear;
    int64_t padded = int_padded_k(l->k);
    const char *w = (const char *)l->weights + panel * int_panel_bytes(l->k, int4);
    const uint8_t *x = job->split;
    few_sums sums[NV];
    memset(sums, 0, sizeof sums);
    if (int4) {
        for (int64_t k = 0; k < padded; k += GROUP, w += INT4_GROUP_BYTES, x += GROUP)
#pragma GCC unroll 3
            for (int v = 0; v < NV; v++) {
                int4_column column = int4_load_column(w, v);
                few_sums s = sums[v];
                for (int quad = 0; quad < GROUP / UNIT; quad++)
                    few_add(&s, int4_expand(&column, w, v, quad), x + quad * UNIT, padded, rows);
                sums[v] = s;
            }
    } else {
        for (int64_t k = 0; k < padded; k += UNIT, w += UNIT * NR, x += UNIT)
#pragma GCC unroll 3
            for (int v = 0; v < NV; v++) {
                _mm_prefetch(w + v * 64 + FETCH_AHEAD, _MM_HINT_T0);
                few_add(&sums[v], _mm512_loadu_si512(w + v * 64), x, padded, rows);
            }
    }
    for (int r = 0; r < rows; r++) {
        int32_t low[NR], high[NR];
        for (int v = 0; v < NV; v++) {
            __m512i offset = _mm512_mullo_epi32(sums[v].weights, _mm512_set1_epi32(HIGH_OFFSET));
            _mm512_storeu_si512(low + v * W, sums[v].low[r]);
            _mm512_storeu_si512(high + v * W, _mm512_sub_epi32(sums[v].high[r], offset));
        }
        store_int_row(l, int4, panel, r, low, high, job->scales[r]);
    }
}

#define FEW_ITEM(rows) \
    static void int8_item_##rows(const void *job, int64_t panel) { few_panel(job, panel, rows, 0); } \
    static void int4_item_##rows(const void *job, int64_t panel) { few_panel(job, panel, rows, 1); }
FEW_ITEM(1)
FEW_ITEM(2)
FEW_ITEM(3)
FEW_ITEM(4)

void pb_linear_int_few(const linear_job *linear, int int4) {
    static void (*const items[2][FEW_ROWS])(const void *, int64_t) = {
        {int8_item_1, int8_item_2, int8_item_3, int8_item_4}, {int4_item_1, int4_item_2, int4_item_3, int4_item_4}};
    few_job job = {*linear, pb_thread_memory(CALLER_MEMORY, linear->m * 2 * int_padded_k(linear->k)), {0}, int4};
    for (int64_t r = 0; r < linear->m; r++) split_few(&job, r);
    pb_parallel(items[int4][linear->m - 1], &job, panels_of(linear->n), linear->threads);
}
#endif
