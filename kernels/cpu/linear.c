/* Linear layers of every storage kind: which kernel multiplies them, how much memory they take, and their rows. */
#include "linear_amx.h"
#include "linear_float.h"
#include "linear_int.h"
#include "processor.h"

enum { SMALL_WORK = 100 * 1000 }; /* multiply-adds below which one thread is faster than two */

/* parts: bf16 numbers that stand for an activation where bf16 weights are multiplied by bf16; three are exact. */
EXPORT void pb_linear(const float *x, const void *weights, const float *bias, float *out, int64_t m, int64_t n,
                      int64_t k, int64_t dtype, int64_t parts, int64_t threads) {
    linear_job job = {x, weights, bias, out, m, n, k, (int)threads};
    if (m * n * k < SMALL_WORK) job.threads = 1;
    if (dtype == DTYPE_INT8 || dtype == DTYPE_INT4) {
        pb_linear_int(&job, dtype == DTYPE_INT4);
        return;
    }
#if PB_AMX
    if (dtype == DTYPE_BFLOAT16) {
        pb_linear_amx(&job, (int)parts);
        return;
    }
#endif
#if PB_BF16_DOT
    if (dtype == DTYPE_BFLOAT16 && parts == 1) { /* two would take as long as fp32 */
        pb_linear_bf16(&job);
        return;
    }
#endif
    (void)parts; /* what multiplies fp32 numbers takes them whole */
    pb_linear_float(&job, dtype == DTYPE_BFLOAT16);
}

/* Whether an activation may be one bf16 number here (``parts``): some unit multiplies bf16 by bf16. */
EXPORT int64_t pb_bf16_products(void) { return PB_AMX || PB_BF16_DOT; }

/* Panels are padded to whole ones: the bias needs that many floats. */
EXPORT int64_t pb_padded_outputs(int64_t n) { return panels_of(n) * NR; }

EXPORT int64_t pb_linear_bytes(int64_t n, int64_t k, int64_t dtype) {
    if (dtype >= DTYPE_INT8) return panels_of(n) * (int_panel_bytes(k, dtype == DTYPE_INT4) + 4 * NR);
    return panels_of(n) * panel_bytes(k, dtype == DTYPE_BFLOAT16);
}

/* 0 if this build cannot run here: the operating system refuses the matrix unit's registers. */
EXPORT int64_t pb_usable(void) {
#if PB_AMX
    return pb_tile_registers();
#else
    return 1;
#endif
}

/* out [count][K] = rows ``ids`` of the packed matrix [n, K]. Returns -1, or the index of an id outside 0 .. n
 * - 1. */
EXPORT int64_t pb_embedding(const int64_t *ids, const void *packed, float *out, int64_t count, int64_t n, int64_t k,
                            int64_t dtype) {
    int bf16 = dtype == DTYPE_BFLOAT16, integer = dtype >= DTYPE_INT8, int4 = dtype == DTYPE_INT4;
    int64_t bytes = integer ? int_panel_bytes(k, int4) : panel_bytes(k, bf16);
    for (int64_t t = 0; t < count; t++) {
        if (ids[t] < 0 || ids[t] >= n) return t;
        const char *panel = (const char *)packed + ids[t] / NR * bytes;
        int64_t lane = ids[t] % NR;
        float scale = integer ? int_scales(packed, n, k, int4)[ids[t]] : 1.0f, *row = out + t * k;
        for (int64_t i = 0; i < k; i++)
            if (integer) row[i] = (float)int_weight(panel, i, lane, int4) * scale;
            else if (bf16) row[i] = bf16_to_float(((const uint16_t *)panel)[((i / 2) * NR + lane) * 2 + (i & 1)]);
            else row[i] = ((const float *)panel)[i * NR + lane];
    }
    return -1;
}
