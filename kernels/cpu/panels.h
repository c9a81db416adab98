/* Packed weights of a linear: what the storage kinds share. It knows none of them: linear.c stands on all. */
#ifndef PB_PANELS_H
#define PB_PANELS_H

#include "simd.h"

/* Machines with a matrix unit also have the byte products and byte permutations that the integer kernels use. */
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__) && PB_AVX512 && \
    defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define PB_AMX 1
#else
#define PB_AMX 0
#endif

enum { DTYPE_FLOAT32 = 0, DTYPE_BFLOAT16 = 1, DTYPE_INT8 = 2, DTYPE_INT4 = 3 };

/* One product out [M, N] = x [M, K] @ W.T + bias; weights in panels of NR outputs, the last one padded with
 * zeros. */
typedef struct {
    const float *x;
    const void *weights;
    const float *bias; /* N floats padded to whole panels, or NULL */
    float *out;
    int64_t m, n, k;
    int threads;
} linear_job;

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t panels_of(int64_t n) { return ceil_div(n, NR); }

INLINE float bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

/* Round to nearest even; a NaN stays one. */
INLINE uint16_t float_to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* Write one row of a tile: ``count`` (1 .. NR) outputs, bias added last. */
INLINE void store_row(float *out, const vf acc[NV], const float *bias, int64_t count) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
        vf value = bias ? acc[v] + vload(bias + v * W) : acc[v];
        int64_t left = count - v * W;
        if (left >= W) vstore(out + v * W, value);
        else if (left > 0) vstore_n(out + v * W, value, (int)left);
    }
}

/* Ask for the output lines of some rows by one panel, which will be written soon. */
INLINE void fetch_output(const linear_job *job, int64_t panel, int64_t first, int64_t rows) {
    for (int64_t r = first; r < first + rows; r++)
        for (int64_t i = 0; i < NR; i += 16) __builtin_prefetch(job->out + r * job->n + panel * NR + i, 1);
}

/* Write a panel's sums [rows][NR] as rows ``first`` on of the output. */
INLINE void store_panel(const linear_job *job, int64_t panel, int64_t first, int64_t rows, const float *sums) {
    for (int64_t r = 0; r < rows; r++) {
        vf acc[NV];
        for (int v = 0; v < NV; v++) acc[v] = vload(sums + r * NR + v * W);
        store_row(job->out + (first + r) * job->n + panel * NR, acc, job->bias ? job->bias + panel * NR : NULL,
                  job->n - panel * NR);
    }
}

#endif
