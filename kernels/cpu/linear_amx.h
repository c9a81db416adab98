/* bf16 weights on the matrix unit, where compiler and machine have one. */
#ifndef PB_LINEAR_AMX_H
#define PB_LINEAR_AMX_H

#include "linear.h"

/* Machines with a matrix unit also have the byte products and byte permutations that the integer kernels use. */
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__) && PB_AVX512 && \
    defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define PB_AMX 1
int pb_amx_usable(void);
void pb_linear_amx(const linear_job *linear, int parts); /* parts: 1 to 3 bf16 numbers for an activation */
#else
#define PB_AMX 0
#endif

/* bf16 panels hold a whole number of this many k (zeros at the end). */
enum { BF16_K_STEP = PB_AMX ? 32 : 2 };

#endif
