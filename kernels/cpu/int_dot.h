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

/* The two numbers at p in every lane. */
INLINE vi pair_of(const int16_t *p) {
    union { int32_t bits; float lane; } pair;
    memcpy(&pair, p, sizeof pair);
    return as_vi(vset1(pair.lane));
}

/* Products of four bytes, of which the first ones are codes: of CODE_BITS and unsigned, or signed where PB_SIGNED_CODES
 * is set. PB_BYTE_DOT: in one instruction, so that two of them are as fast as the product of pairs. PB_ANY_BYTE_DOT: in
 * several, of which one is still faster than that. */
#if (PB_AVX512 && defined(__AVX512VNNI__)) || (PB_AVX2 && defined(__AVXVNNI__))
#define PB_BYTE_DOT 1
#define PB_ANY_BYTE_DOT 1
#define PB_SIGNED_CODES 0
#define CODE_BITS 8
/* codes [4] . numbers [4], added to 32-bit sums. */
INLINE vi vdot_bytes(vi acc, vi codes, vi numbers) {
#if PB_AVX512
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)numbers);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, (__m256i)numbers);
#endif
}
#elif PB_AVX2
#define PB_BYTE_DOT 0
#define PB_ANY_BYTE_DOT 1
#define PB_SIGNED_CODES 0
#define CODE_BITS 7 /* the sum of two products has 16 bits */
INLINE vi vdot_bytes(vi acc, vi codes, vi numbers) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)numbers);
    return vdot(acc, (vi)pairs, (vi)_mm256_set1_epi16(1));
}
#elif PB_NEON && defined(__ARM_FEATURE_DOTPROD)
#define PB_BYTE_DOT 1
#define PB_ANY_BYTE_DOT 1
#define PB_SIGNED_CODES 1
#define CODE_BITS 8
INLINE vi vdot_bytes(vi acc, vi codes, vi numbers) {
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)codes, (int8x16_t)numbers);
}
#else
#define PB_BYTE_DOT 0
#define PB_ANY_BYTE_DOT 0
#define PB_SIGNED_CODES 0
#define CODE_BITS 8
INLINE vi vdot_bytes(vi acc, vi codes, vi numbers) { return (void)codes, (void)numbers, acc; } /* to be compiled only */
#endif

/* The same for the four bytes at p, then the four after them. */
INLINE void vdot_low_and_high(vi *low, vi *high, vi codes, const char *p) {
#if PB_NEON && PB_BYTE_DOT
    int8x8_t both = vld1_s8((const int8_t *)p);
    *low = (vi)vdotq_lane_s32((int32x4_t)*low, (int8x16_t)codes, both, 0);
    *high = (vi)vdotq_lane_s32((int32x4_t)*high, (int8x16_t)codes, both, 1);
#else
    *low = vdot_bytes(*low, codes, pair_of((const int16_t *)p));
    *high = vdot_bytes(*high, codes, pair_of((const int16_t *)(p + 4)));
#endif
}

#endif
