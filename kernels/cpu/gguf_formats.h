/* GGML's block formats: their numbers in GGUF files, and fp16 as they hold it. */
#ifndef PB_GGUF_FORMATS_H
#define PB_GGUF_FORMATS_H

#include "simd.h"

enum {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39,
};

/* fp16 at p -> fp32. */
INLINE float half_at(const uint8_t *p) {
    uint32_t bits = p[0] | (uint32_t)p[1] << 8, sign = (bits & 0x8000) << 16, rest = bits & 0x7fff, word;
    float x;
    if (rest >= 0x7c00) word = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) word = sign | ((rest << 13) + (112u << 23));
    else {
        x = (float)rest * 0x1p-24f;
        memcpy(&word, &x, 4);
        word |= sign;
    }
    memcpy(&x, &word, 4);
    return x;
}

#endif
