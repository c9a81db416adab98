/* Products of small integers with exact 32-bit sums, in every lane of a vector. */
#ifndef PB_INT_DOT_H
#define PB_INT_DOT_H

#include "simd.h"

typedef int16_t vs __attribute__((vector_size(W * 4)));
typedef uint16_t vu __attribute__((vector_size(W * 4)));

/* a [pairs] . b [pairs] of 16-bit numbers, added to 32-bit sums. */
INLINE vi vdot(vi acc, vi a, vi b) {
#if PB_AVX512 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif PB_AVX512
    return acc + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif PB_AVX2 && defined(__AVXVNNI__)
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#elif PB_AVX2
    acc += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    __asm__("" : "+x"(acc)); /* the sum now, or compilers keep products of many steps to add them up later */
    return acc;
#elif PB_NEON
    int16x4_t x = vget_low_s16((int16x8_t)a), even = vget_low_s16(vuzp1q_s16((int16x8_t)b, (int16x8_t)b)),
              odd = vget_low_s16(vuzp2q_s16((int16x8_t)b, (int16x8_t)b)); /* once for all rows */
    return (vi)vmlal_lane_s16(vmlal_lane_s16((int32x4_t)acc, even, x, 0), odd, x, 1);
#else
    vi low = (a << 16 >> 16) * (b << 16 >> 16), high = (a >> 16) * (b >> 16);
    return acc + low + high;
#endif
}

#if (PB_AVX512 && defined(__AVX512VNNI__)) || (PB_AVX2 && defined(__AVXVNNI__))
#define PB_BYTE_DOT 1
/* a [4] . b [4] of unsigned by signed bytes, added to 32-bit sums. */
INLINE vi vdot_bytes(vi acc, vi a, vi b) {
#if PB_AVX512
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#endif
}
#else
#define PB_BYTE_DOT 0
INLINE vi vdot_bytes(vi acc, vi a, vi b) { return (void)a, (void)b, acc; } /* to be compiled only */
#endif

/* The two numbers at p in every lane. */
INLINE vi pair_of(const int16_t *p) {
    union { int32_t bits; float lane; } pair;
    memcpy(&pair, p, sizeof pair);
    return as_vi(vset1(pair.lane));
}

#endif
