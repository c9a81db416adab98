/* One vector type for every instruction set, chosen at compile time.
 *
 * vf / vi: W floats / W int32. GCC vector extensions give arithmetic, comparison and selection on all
 * targets; intrinsics are used only where the extensions have no word for it (fused multiply-add, partial
 * loads). The sizes of the register tiles of linear_float.c and attention.c follow from the number of registers:
 *   NV vectors make one panel of NR outputs, MR rows share it: MR * NV accumulators + NV + 1 <= registers.
 */
#ifndef PB_SIMD_H
#define PB_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define PB_AVX512 1
#define W 16
#define NV 3
#define MR 8
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define PB_AVX2 1
#define W 8
#define NV 2
#define MR 6
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define PB_NEON 1
#define W 4
#define NV 4
#define MR 6
#else
#define PB_GENERIC 1
#define W 4
#define NV 2
#define MR 4
#endif

#define NR (W * NV)

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));

INLINE vf vload(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vstore(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vi viload(const void *p) { vi v; memcpy(&v, p, sizeof v); return v; }
INLINE vf vset1(float x) { /* an initialiser, not 0 + x, which would be an addition */
#if W == 16
    return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif W == 8
    return (vf){x, x, x, x, x, x, x, x};
#else
    return (vf){x, x, x, x};
#endif
}
INLINE vf as_vf(vi v) { vf r; memcpy(&r, &v, sizeof r); return r; }
INLINE vi as_vi(vf v) { vi r; memcpy(&r, &v, sizeof r); return r; }
INLINE vf vselect(vi mask, vf yes, vf no) { return as_vf((as_vi(yes) & mask) | (as_vi(no) & ~mask)); }
INLINE vi vlanes(void) {
    vi v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

/* a * b + c with one rounding, the only way products are accumulated: equal bits in every tile shape. */
INLINE vf vfma(vf a, vf b, vf c) {
#if PB_AVX512
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif PB_AVX2
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif PB_NEON
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf vmax(vf a, vf b) {
#if PB_AVX512
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif PB_AVX2
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vselect(a > b, a, b);
#endif
}

INLINE vf vmin(vf a, vf b) {
#if PB_AVX512
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif PB_AVX2
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vselect(a < b, a, b);
#endif
}

/* First n (1..W) floats of p, zeros after them; nothing beyond is read. */
INLINE vf vload_n(const float *p, int n) {
#if PB_AVX512
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    if (n == W) return vload(p);
#if PB_AVX2
    return (vf)_mm256_maskload_ps(p, (__m256i)(vlanes() < n));
#endif
    vf v = {};
    memcpy(&v, p, 4 * (size_t)n);
    return v;
#endif
}

INLINE void vstore_n(float *p, vf v, int n) {
#if PB_AVX512
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
    if (n == W) vstore(p, v);
    else memcpy(p, &v, 4 * (size_t)n); /* masked stores are slow on AVX2 */
#endif
}

/* W numbers of 16 bits, unsigned, as 32-bit ones. Intrinsics where the compiler would convert in pieces. */
INLINE vi vload_u16(const void *p) {
#if PB_AVX512
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
#elif PB_AVX2
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128(p));
#elif PB_NEON
    return (vi)vmovl_u16(vld1_u16(p));
#else
    uint16_t __attribute__((vector_size(W * 2))) numbers;
    memcpy(&numbers, p, sizeof numbers);
    return __builtin_convertvector(numbers, vi);
#endif
}

/* bf16 numbers as floats: their bits are the upper half. */
INLINE vf vload_bf16(const uint16_t *p) { return as_vf(vload_u16(p) << 16); }

INLINE vf vload_bf16_n(const uint16_t *p, int n) {
    if (n == W) return vload_bf16(p);
    uint16_t part[W] = {};
    memcpy(part, p, 2 * (size_t)n);
    return vload_bf16(part);
}

/* W bytes, signed or not, as numbers. */
INLINE vf vload_bytes(const char *p, int is_signed) {
#if PB_AVX512
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return (vf)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif PB_AVX2
    __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    return (vf)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#elif PB_NEON
    uint32_t word;
    memcpy(&word, p, 4);
    uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(word));
    if (!is_signed) return (vf)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
    return (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes)))));
#else
    vf numbers;
    for (int i = 0; i < W; i++) numbers[i] = (float)(is_signed ? ((const int8_t *)p)[i] : ((const uint8_t *)p)[i]);
    return numbers;
#endif
}

/* Horizontal sum and maximum, always by the same tree. */
INLINE float vsum(vf v) {
    float a[W];
    memcpy(a, &v, sizeof a);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}

INLINE float vmaximum(vf v) {
#if PB_AVX512
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

/* exp, relative error about 1e-7: 2^n * p(r), r within half a log 2. Below -87 the result is 0 (also for
 * -inf). */
INLINE vf vexp(vf x) {
    const vf magic = vset1(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer kept in the low bits */
    vi tiny = x < -87.0f;
    x = vselect(x > 88.3f, vset1(88.3f), vselect(tiny, vset1(-87.0f), x));
    vf shifted = vfma(x, vset1(1.44269504f), magic);
    vf n = shifted - magic;
    vf r = vfma(n, vset1(-0.693145752f), x);
    r = vfma(n, vset1(-1.42860677e-6f), r);
    vf p = vset1(1.39505159e-3f);
    p = vfma(p, r, vset1(8.36890901e-3f));
    p = vfma(p, r, vset1(4.16662054e-2f));
    p = vfma(p, r, vset1(1.66665187e-1f));
    p = vfma(p, r, vset1(0.5f));
    p = vfma(p, r, vset1(1.0f));
    p = vfma(p, r, vset1(1.0f));
    return vselect(tiny, vset1(0.0f), as_vf(as_vi(p) + (as_vi(shifted) << 23)));
}

/* 2^x for x <= 0, relative error below 1e-7, exactly 1 at 0. Below -125.5 the result is 0 (also for -inf); the
 * order of vmax keeps a NaN. */
INLINE vf vexp2(vf x) {
    const vf magic = vset1(12582912.0f); /* as in vexp */
    vf bounded = vmax(vset1(-126.0f), x), shifted = bounded + magic, r = bounded - (shifted - magic);
    vf p = vset1(1.5353362e-4f);
    p = vfma(p, r, vset1(1.3398875e-3f));
    p = vfma(p, r, vset1(9.61843692e-3f));
    p = vfma(p, r, vset1(5.55033237e-2f));
    p = vfma(p, r, vset1(2.40226477e-1f));
    p = vfma(p, r, vset1(6.93147182e-1f));
    p = vfma(p, r, vset1(1.0f));
    return as_vf((as_vi(p) + (as_vi(shifted) << 23)) & ~(x < -125.5f));
}

INLINE vf vcopysign(vf magnitude, vf sign) {
    vi bit = (vi){} + INT32_MIN;
    return as_vf((as_vi(magnitude) & ~bit) | (as_vi(sign) & bit));
}

INLINE vf vabs(vf x) { return as_vf(as_vi(x) & ((vi){} + INT32_MAX)); }

/* tanh: odd polynomial (minimax) below 0.6, 1 - 2 / (exp(2|x|) + 1) above. */
INLINE vf vtanh(vf x) {
    vf a = vabs(x), z = x * x;
    vf p = vset1(-0.0058433148f);
    p = vfma(p, z, vset1(0.0207554906f));
    p = vfma(p, z, vset1(-0.0537731465f));
    p = vfma(p, z, vset1(0.133318159f));
    p = vfma(p, z, vset1(-0.333332947f));
    vf small = vfma(p * z, x, x);
    vf large = 1.0f - 2.0f / (vexp(a + a) + 1.0f);
    return vselect(a < 0.6f, small, vcopysign(large, x));
}

/* erf: x * P(x^2) below 1, 1 - exp(-Q(|x|)) up to 4, where it is 1 in float; absolute error about 1e-7. */
INLINE vf verf(vf x) {
    vf a = vabs(x), z = x * x;
    vf p = vset1(7.82395867e-05f);
    p = vfma(p, z, vset1(-0.000800278823f));
    p = vfma(p, z, vset1(0.00518767609f));
    p = vfma(p, z, vset1(-0.0268535714f));
    p = vfma(p, z, vset1(0.112835819f));
    p = vfma(p, z, vset1(-0.376126258f));
    p = vfma(p, z, vset1(1.12837917f));
    a = vselect(a > 4.0f, vset1(4.0f), a);
    vf q = vset1(-0.000187975232f);
    q = vfma(q, a, vset1(0.00296403964f));
    q = vfma(q, a, vset1(-0.0219066056f));
    q = vfma(q, a, vset1(0.103256463f));
    q = vfma(q, a, vset1(0.637964709f));
    q = vfma(q, a, vset1(1.12720245f));
    q = vfma(q, a, vset1(0.000312429793f));
    vf large = vcopysign(1.0f - vexp(-q), x);
    return vselect(a < 1.0f, p * x, large);
}

#endif
