/* Expansion of GGUF's common block formats to fp32, bit for bit as the numpy code of checkpoints has it.
 *
 * Block layouts after ggml's ggml-common.h. Products are rounded before a minimum is added or taken off, so
 * nothing here may be fused.
 */
#include "gguf_formats.h"
#include "threads.h"

#pragma STDC FP_CONTRACT OFF
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#endif

enum { SLICE_BLOCKS = 512 };

static void q8_0(const uint8_t *b, float *out) {
    float d = half_at(b);
    for (int i = 0; i < 32; i++) out[i] = (float)((const int8_t *)b)[2 + i] * d;
}

static void q4_0(const uint8_t *b, float *out) {
    float d = half_at(b);
    for (int i = 0; i < 16; i++) {
        out[i] = (float)((b[2 + i] & 15) - 8) * d;
        out[16 + i] = (float)((b[2 + i] >> 4) - 8) * d;
    }
}

static void q4_1(const uint8_t *b, float *out) {
    float d = half_at(b), m = half_at(b + 2);
    for (int i = 0; i < 16; i++) {
        out[i] = (float)(b[4 + i] & 15) * d + m;
        out[16 + i] = (float)(b[4 + i] >> 4) * d + m;
    }
}

/* Nibbles and the 32 fifth bits -> 0 .. 31. */
INLINE void five_bits(const uint8_t *high, const uint8_t *low, int *out) {
    uint32_t bits;
    memcpy(&bits, high, 4); /* little-endian, as all targets of this library are */
    for (int i = 0; i < 16; i++) {
        out[i] = (int)((low[i] & 15) | (bits >> i & 1) << 4);
        out[16 + i] = (int)((low[i] >> 4) | (bits >> (16 + i) & 1) << 4);
    }
}

static void q5_0(const uint8_t *b, float *out) {
    float d = half_at(b);
    int q[32];
    five_bits(b + 2, b + 6, q);
    for (int i = 0; i < 32; i++) out[i] = (float)(q[i] - 16) * d;
}

static void q5_1(const uint8_t *b, float *out) {
    float d = half_at(b), m = half_at(b + 2);
    int q[32];
    five_bits(b + 4, b + 8, q);
    for (int i = 0; i < 32; i++) out[i] = (float)q[i] * d + m;
}

/* Scale and minimum of the 8 sub-blocks of Q4_K and Q5_K, 6 bits each in twelve bytes: four scales, four
 * minima (the top 2 bits of each of these belong to the second four), then the low nibbles of the second four
 * scales and, above them, of the second four minima. */
INLINE void k_scales(const uint8_t *b, float *scales, float *minima) {
    float d = half_at(b), m = half_at(b + 2);
    const uint8_t *first = b + 4, *second = b + 8, *mixed = b + 12;
    for (int i = 0; i < 4; i++) {
        scales[i] = d * (float)(first[i] & 63);
        minima[i] = m * (float)(second[i] & 63);
        scales[4 + i] = d * (float)((mixed[i] & 15) | (first[i] >> 2 & 48));
        minima[4 + i] = m * (float)((mixed[i] >> 4) | (second[i] >> 2 & 48));
    }
}

static void q4_k(const uint8_t *b, float *out) {
    float scales[8], minima[8];
    k_scales(b, scales, minima);
    for (int pair = 0; pair < 4; pair++, out += 64)
        for (int i = 0; i < 32; i++) {
            int q = b[16 + pair * 32 + i];
            out[i] = (float)(q & 15) * scales[2 * pair] - minima[2 * pair];
            out[32 + i] = (float)(q >> 4) * scales[2 * pair + 1] - minima[2 * pair + 1];
        }
}

static void q5_k(const uint8_t *b, float *out) {
    float scales[8], minima[8];
    k_scales(b, scales, minima);
    for (int pair = 0; pair < 4; pair++, out += 64)
        for (int i = 0; i < 32; i++) {
            int q = b[48 + pair * 32 + i], fifth = b[16 + i] >> (2 * pair);
            out[i] = (float)((q & 15) | (fifth & 1) << 4) * scales[2 * pair] - minima[2 * pair];
            out[32 + i] = (float)((q >> 4) | (fifth >> 1 & 1) << 4) * scales[2 * pair + 1] - minima[2 * pair + 1];
        }
}

static void q6_k(const uint8_t *b, float *out) {
    float d = half_at(b + 208), scales[16];
    for (int i = 0; i < 16; i++) scales[i] = d * (float)((const int8_t *)b)[192 + i];
    for (int half = 0; half < 2; half++)
        for (int part = 0; part < 4; part++)
            for (int i = 0; i < 32; i++) {
                int low = b[half * 64 + (part & 1) * 32 + i], high = b[128 + half * 32 + i] >> (2 * part);
                int q = (part < 2 ? low & 15 : low >> 4) | (high & 3) << 4;
                *out++ = (float)(q - 32) * scales[half * 8 + part * 2 + i / 16];
            }
}

typedef struct {
    const uint8_t *source;
    float *out;
    void (*expand)(const uint8_t *, float *);
    int64_t blocks, values, bytes;
} expand_job;

static void expand_slice(const void *context, int64_t item) {
    const expand_job *job = context;
    int64_t end = (item + 1) * SLICE_BLOCKS;
    if (end > job->blocks) end = job->blocks;
    for (int64_t i = item * SLICE_BLOCKS; i < end; i++)
        job->expand(job->source + i * job->bytes, job->out + i * job->values);
}

/* source: ``bytes`` bytes, whole blocks of the format with that number in GGUF files; out: ``values`` floats. Having
 * written nothing, returns 0 for a format that is not here, -1 where the bytes do not hold that many values. */
EXPORT int64_t pb_expand_gguf(int64_t format, const void *source, int64_t bytes, float *out, int64_t values,
                              int64_t threads) {
    static const struct {
        int format, values, bytes;
        void (*expand)(const uint8_t *, float *);
    } formats[] = {
        {Q4_0, 32, 18, q4_0}, {Q4_1, 32, 20, q4_1}, {Q5_0, 32, 22, q5_0}, {Q5_1, 32, 24, q5_1},
        {Q8_0, 32, 34, q8_0}, {Q4_K, 256, 144, q4_k}, {Q5_K, 256, 176, q5_k}, {Q6_K, 256, 210, q6_k},
    };
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].format == format) {
            int64_t blocks = bytes / formats[i].bytes;
            if (blocks * formats[i].bytes != bytes || blocks * formats[i].values != values) return -1;
            expand_job job = {source, out, formats[i].expand, blocks, formats[i].values, formats[i].bytes};
            pb_parallel(expand_slice, &job, (job.blocks + SLICE_BLOCKS - 1) / SLICE_BLOCKS, (int)threads);
            return 1;
        }
    return 0;
}
