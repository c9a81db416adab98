/* GGML's block formats one by one: what their packed blocks hold, and the rows of a packed matrix.
 *
 * Values are those of the format's definition bit for bit: products are rounded before a minimum is added, so nothing
 * here may be fused.
 */
#include "blocks.h"

#pragma STDC FP_CONTRACT OFF
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#endif

enum { SIGNED = 128 }; /* the offset of codes that are any int8 */

#define UP(x) (uint8_t)((x) + SIGNED)
static const uint8_t iq4_table[16] = {UP(-127), UP(-104), UP(-83), UP(-65), UP(-49), UP(-35), UP(-22), UP(-10),
                                      UP(1),    UP(13),   UP(25),  UP(38),  UP(53),  UP(69),  UP(89),  UP(113)};
static const uint8_t mxfp4_table[16] = {UP(0), UP(1),  UP(2),  UP(3),  UP(4),  UP(6),  UP(8),  UP(12),
                                        UP(0), UP(-1), UP(-2), UP(-3), UP(-4), UP(-6), UP(-8), UP(-12)};

const block_format *pb_block_format(int64_t id) {
    static const block_format formats[] = {
        {Q4_0, 32, 18, CODES_4, 8, HALF, NULL},
        {Q4_1, 32, 20, CODES_4, 0, HALF_MIN, NULL},
        {Q5_0, 32, 22, CODES_5, 16, HALF, NULL},
        {Q5_1, 32, 24, CODES_5, 0, HALF_MIN, NULL},
        {Q8_0, 32, 34, CODES_8, SIGNED, HALF, NULL},
        {Q2_K, 256, 84, CODES_2, 0, SUPER_NIBBLES, NULL},
        {Q3_K, 256, 110, CODES_3, 4, SUPER, NULL},
        {Q4_K, 256, 144, CODES_4, 0, SUPER_MIN, NULL},
        {Q5_K, 256, 176, CODES_5, 0, SUPER_MIN, NULL},
        {Q6_K, 256, 210, CODES_6, 32, SUPER, NULL},
        {IQ4_NL, 32, 18, CODES_TABLE, SIGNED, HALF, iq4_table},
        {IQ4_XS, 256, 136, CODES_TABLE, SIGNED, SUPER, iq4_table},
        {MXFP4, 32, 17, CODES_TABLE, SIGNED, POWER, mxfp4_table},
    };
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].id == id) return &formats[i];
    return NULL;
}

/* Bytes of a row of k values as a file has it. 0: no such format here; -1: k values are not whole blocks. */
EXPORT int64_t pb_block_row_bytes(int64_t k, int64_t format) {
    const block_format *f = pb_block_format(format);
    if (!f) return 0;
    return k % f->values ? -1 : k / f->values * f->bytes;
}

EXPORT int64_t pb_linear_blocks_bytes(int64_t n, int64_t k, int64_t format) {
    return block_panels(n) * blocks_panel_bytes(pb_block_format(format), k);
}

/* W fp16 numbers. */
INLINE vf load_halves(const char *p) {
#if PB_AVX512
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif PB_AVX2 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif PB_NEON
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
#else
    vi bits = vload_u16(p), rest = bits & 0x7fff, finite = rest < 0x7c00;
    vf small = as_vf(rest << 13) * vset1(0x1p112f); /* right for denormal numbers too */
    vi word = (as_vi(small) & finite) | ((rest << 13 | 0x7f800000) & ~finite);
    return as_vf(word | (bits & 0x8000) << 16);
#endif
}

/* 2^(e - 128) of W bytes e, which is half of what they stand for as the table's numbers are doubled. */
INLINE vf load_powers(const char *p) {
    vi e = __builtin_convertvector(vload_bytes(p, 0), vi);
    vi tiny = e < 2, word = ((e - 1) << 23 & ~tiny) | ((0x00200000 << (e & 1)) & tiny);
    return as_vf(word);
}

void pb_block_scales(const block_format *f, const char *block, int64_t groups, float *scales, float *minima) {
    const int64_t runs = groups * GROUP_K / scaled_k(f->codes), count = runs * LANES;
    const char *fine = block + LANES * (f->scales == SUPER ? 2 : 4); /* where a block's factors end */
    if (f->scales <= POWER) {
        for (int64_t i = 0; i < count; i += W) {
            vstore(scales + i, f->scales == POWER ? load_powers(block + i) : load_halves(block + i * 2));
            if (f->scales == HALF_MIN) vstore(minima + i, load_halves(block + (count + i) * 2));
        }
        return;
    }
    for (int lane = 0; lane < LANES; lane += W) {
        vf d = load_halves(block + lane * 2), least = f->scales == SUPER ? d : load_halves(block + (LANES + lane) * 2);
        for (int64_t i = lane; i < count; i += LANES) {
            if (f->scales == SUPER) vstore(scales + i, d * vload_bytes(fine + i, 1));
            else if (f->scales == SUPER_MIN) {
                vstore(scales + i, d * vload_bytes(fine + i, 0));
                vstore(minima + i, -(least * vload_bytes(fine + count + i, 0)));
            } else {
                vi both = __builtin_convertvector(vload_bytes(fine + i, 0), vi);
                vstore(scales + i, d * __builtin_convertvector(both & 15, vf));
                vstore(minima + i, -(least * __builtin_convertvector(both >> 4, vf)));
            }
        }
    }
}

/* out [count][K] = rows ``ids`` of the packed matrix [n, K]. Returns -1, or the index of an id outside 0 .. n - 1. */
EXPORT int64_t pb_embedding_blocks(const int64_t *ids, const void *packed, float *out, int64_t count, int64_t n,
                                   int64_t k, int64_t format) {
    const block_format *f = pb_block_format(format);
    const vi table = load_table(f->table);
    const int run = scaled_k(f->codes);
    float scales[MOST_SCALES * LANES], minima[MOST_SCALES * LANES] = {};
    for (int64_t t = 0; t < count; t++) {
        if (ids[t] < 0 || ids[t] >= n) return t;
        const char *block = (const char *)packed + ids[t] / LANES * blocks_panel_bytes(f, k);
        int lane = (int)(ids[t] % LANES);
        float *row = out + t * k;
        for (int64_t first = 0; first < k; first += BLOCK) {
            int64_t groups = (k - first < BLOCK ? k - first : BLOCK) / GROUP_K;
            pb_block_scales(f, block, groups, scales, minima);
            const char *codes = block + block_head(f, groups);
            for (int i = 0; i < groups * GROUP_K; i += 4) {
                const char *group = codes + i / GROUP_K * code_bits(f->codes) * LINE;
                int quad = code_quad(group, lane / W, f->codes, i % GROUP_K / 4, table)[lane % W];
                int at = i / run * LANES + lane;
                for (int j = 0; j < 4; j++)
                    *row++ = (float)((quad >> 8 * j & 255) - f->offset) * scales[at] + minima[at];
            }
            block += block_bytes(f, groups);
        }
    }
    return -1;
}
