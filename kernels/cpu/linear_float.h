/* Panels of fp32 and bf16 weights (linear_float.c says how they lie) and their products on vector units. */
#ifndef PB_LINEAR_FLOAT_H
#define PB_LINEAR_FLOAT_H

#include "panels.h"

/* bf16 panels hold a whole number of this many k (zeros at the end). */
enum { BF16_K_STEP = PB_AMX ? 32 : 2 };

INLINE int64_t panel_bytes(int64_t k, int bf16) {
    return (bf16 ? ceil_div(k, BF16_K_STEP) * BF16_K_STEP * 2 : k * 4) * NR;
}

void pb_linear_float(const linear_job *linear, int bf16);

/* Vector units that multiply bf16 by bf16; the matrix unit does that better. */
#if PB_AVX512 && defined(__AVX512BF16__) && !PB_AMX
#define PB_BF16_DOT 1
#else
#define PB_BF16_DOT 0
#endif

void pb_linear_bf16(const linear_job *linear); /* with activations rounded to bf16 */

#endif
