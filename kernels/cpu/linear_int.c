/* Linear layers with int8 and int4 weights: products on vector units.
 *
 * Products are 16 x 16 bits with exact 32-bit sums (vpdpwssd, vpmaddwd). A block of K of one panel is widened
 * to 16 bits in the first-level cache, where all rows use it; the block's integer sums are then added to fp32
 * totals. Blocks have fixed bounds, so a row's result depends on nothing but the row.
 */
#include "linear_int.h"
#include "threads.h"

#if !PB_AMX
enum {
    K_BLOCK = 512,            /* 8191 * 127 * 512 < 2^31 */
    INT_ROWS = 16 * MR,
};

/* a [pairs] . b [pairs] of 16-bit numbers, added to 32-bit sums. */
INLINE vi vdot(vi acc, vi a, vi b) {
#if PB_AVX512 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif PB_AVX512
    return acc + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif PB_AVX2 && defined(__AVXVNNI__)
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#elif PB_AVX2
    return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif PB_NEON
    int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return acc + (vi)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
    vi low = (a << 16 >> 16) * (b << 16 >> 16), high = (a >> 16) * (b >> 16);
    return acc + low + high;
#endif
}

typedef int16_t vs __attribute__((vector_size(W * 4)));
typedef uint16_t vu __attribute__((vector_size(W * 4)));
typedef int8_t half_bytes __attribute__((vector_size(W * 2)));

/* 2 W bytes, widened. */
INLINE vs widen(const void *p) {
    half_bytes v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vs);
}

/* Steps or offsets of W outputs, each twice. */
INLINE vu twice(const char *p) {
    uint16_t v[W];
    vi wide;
    memcpy(v, p, sizeof v);
    for (int i = 0; i < W; i++) wide[i] = v[i];
    return (vu)(wide | wide << 16);
}

/* out [k / 2][NR] pairs = the numbers of ``count`` k of a panel from ``from`` on. */
static void widen_block(int16_t *out, const char *panel, int64_t from, int64_t count, int int4) {
    if (!int4) {
        for (int64_t i = 0; i < count * NR; i += 2 * W) {
            vs v = widen(panel + from * NR + i);
            memcpy(out + i, &v, sizeof v);
        }
        return;
    }
    for (int64_t g = from / GROUP; g < (from + count) / GROUP; g++, out += GROUP * NR) {
        const char *group = panel + g * INT4_GROUP_BYTES;
        for (int v = 0; v < NV; v++) {
            vu step = twice(group + v * W * 2), offset = twice(group + NR * 2 + v * W * 2);
            for (int quad = 0; quad < GROUP / 4; quad++) {
                vu both = (vu)widen(group + GROUP_PARAMETERS + (quad * NV + v) * 2 * W);
                vs low = (vs)((both & 15) * step + offset) >> INT4_SHIFT; /* modulo 2^16; the sum is in range */
                vs high = (vs)((both >> 4 & 15) * step + offset) >> INT4_SHIFT;
                memcpy(out + (quad * 2 * NR + v * W) * 2, &low, sizeof low);
                memcpy(out + ((quad * 2 + 1) * NR + v * W) * 2, &high, sizeof high);
            }
        }
    }
}

/* totals [rows][NR] += q [rows][ldq] times a widened block of ``pairs`` pairs. */
INLINE void int_tile(const int16_t *q, int64_t ldq, const int16_t *w, int64_t pairs, float *totals, int rows) {
    vi acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = (vi){};
    for (int64_t p = 0; p < pairs; p++, w += 2 * NR, q += 2) {
        vi b[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) b[v] = viload(w + v * 2 * W);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, q + r * ldq, 4);
            vi a = as_vi(vset1((union { int32_t i; float f; }){pair}.f));
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] = vdot(acc[r][v], a, b[v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            float *at = totals + r * NR + v * W;
            vstore(at, vload(at) + __builtin_convertvector(acc[r][v], vf));
        }
}

static void int_tile_of(const int16_t *q, int64_t ldq, const int16_t *w, int64_t pairs, float *totals, int64_t rows) {
    switch (rows) {
    case 1: int_tile(q, ldq, w, pairs, totals, 1); break;
    case 2: int_tile(q, ldq, w, pairs, totals, 2); break;
    case 3: int_tile(q, ldq, w, pairs, totals, 3); break;
#if MR >= 6
    case 4: int_tile(q, ldq, w, pairs, totals, 4); break;
    case 5: int_tile(q, ldq, w, pairs, totals, 5); break;
#endif
#if MR >= 8
    case 6: int_tile(q, ldq, w, pairs, totals, 6); break;
    case 7: int_tile(q, ldq, w, pairs, totals, 7); break;
#endif
    default: int_tile(q, ldq, w, pairs, totals, MR);
    }
}

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
        widen_block(wide, w, k, count, job->int4);
        for (int64_t i = 0; i < tiles; i++) {
            int64_t from = rows * i / tiles, to = rows * (i + 1) / tiles;
            int_tile_of(job->q + (first + from) * padded + k, padded, wide, count / 2, totals + from * NR, to - from);
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
