/* Weights in GGML's block formats, as the file has them: the same codes and scales in another order.
 *
 * A weight is (code - offset) * scale, or code * scale + minimum. Codes are unsigned; a format whose codes are not, or
 * stand for the numbers of a table, has them moved up by its offset. Scales and minima are of 16 or 32 consecutive k.
 *
 * Panels of LANES outputs, one after the other. A panel is blocks of BLOCK k; the last may have fewer, in whole GROUPs.
 * A block is its scales, then its codes:
 *   scales: what the format has in a block, LANES of each beside each other, padded to whole lines;
 *   codes: per GROUP as many lines as a code has bits. A line has 4 bytes of every lane; with code_quad() it gives four
 *   consecutive k of each lane, a "quad", at some shift. The low 2, 4 or 8 bits of codes are in lines of their own. A
 *   line of the rest goes before those that it belongs to, so that reading goes forward, which processors foresee.
 */
#ifndef PB_BLOCKS_H
#define PB_BLOCKS_H

#include "gguf_formats.h"
#include "int_dot.h"
#include "panels.h"

enum {
    BLOCK = 256,
    GROUP_K = 32,                          /* k of which codes are whole lines */
    QUADS = GROUP_K / 4,
    BLOCK_GROUPS = BLOCK / GROUP_K,
    MOST_SCALES = BLOCK / 16,              /* scales of one output in a block */
    LANES = W == 16 ? 32 : 16,
    LINE = LANES * 4,
};

/* How codes lie. Those of 2, 3 and 6 bits have a scale for 16 k, the others for 32. */
enum { CODES_2, CODES_3, CODES_4, CODES_TABLE, CODES_5, CODES_6, CODES_8, CODE_KINDS };

/* HALF: an fp16 scale of each GROUP; HALF_MIN: then as many fp16 minima; POWER: exponents of two. SUPER: an fp16 factor
 * of the block and an int8 scale of each run; SUPER_MIN: two such factors, uint8 scales, then minima to be taken off;
 * SUPER_NIBBLES: scale and minimum are the halves of a byte. */
enum { HALF, HALF_MIN, POWER, SUPER, SUPER_MIN, SUPER_NIBBLES };

typedef struct {
    int id, values, bytes; /* of a block as the file has it */
    int codes, offset, scales;
    const uint8_t *table; /* CODES_TABLE: what 4 bits stand for, moved up by the offset */
} block_format;

/* NULL where there is no such format here. */
const block_format *pb_block_format(int64_t id);

INLINE int code_bits(int codes) {
    if (codes <= CODES_TABLE) return codes == CODES_2 ? 2 : codes == CODES_3 ? 3 : 4;
    return codes == CODES_5 ? 5 : codes == CODES_6 ? 6 : 8;
}
INLINE int scaled_k(int codes) { return codes <= CODES_3 || codes == CODES_6 ? 16 : 32; }
/* Whether codes are more than 7 bits: these have the offset 128. */
INLINE int any_byte(int codes) { return codes == CODES_8 || codes == CODES_TABLE; }
INLINE int has_minima(const block_format *f) {
    return f->scales == HALF_MIN || f->scales == SUPER_MIN || f->scales == SUPER_NIBBLES;
}

/* Bytes of the scales of a block of so many groups. */
INLINE int64_t block_head(const block_format *f, int64_t groups) {
    int64_t runs = groups * GROUP_K / scaled_k(f->codes), bytes;
    switch (f->scales) {
    case HALF: bytes = groups * LANES * 2; break;
    case HALF_MIN: bytes = groups * LANES * 4; break;
    case POWER: bytes = groups * LANES; break;
    case SUPER: bytes = LANES * 2 + runs * LANES; break;
    case SUPER_MIN: bytes = LANES * 4 + runs * LANES * 2; break;
    default: bytes = LANES * 4 + runs * LANES;
    }
    return ceil_div(bytes, LINE) * LINE;
}

INLINE int64_t block_bytes(const block_format *f, int64_t groups) {
    return block_head(f, groups) + groups * code_bits(f->codes) * LINE;
}

INLINE int64_t blocks_panel_bytes(const block_format *f, int64_t k) {
    int64_t rest = k % BLOCK / GROUP_K;
    return k / BLOCK * block_bytes(f, BLOCK_GROUPS) + (rest ? block_bytes(f, rest) : 0);
}

INLINE int64_t block_panels(int64_t n) { return ceil_div(n, LANES); }

/* scales, minima [runs][LANES] of a block, as floats; minima only if the format has any, what is to be taken off as
 * negative numbers. Products are exact. */
void pb_block_scales(const block_format *f, const char *block, int64_t groups, float *scales, float *minima);

/* A table of 16 bytes as look_up() takes it. */
INLINE vi load_table(const uint8_t *table) {
    vi v = {};
    for (int i = 0; table && i < W / 4; i++) memcpy((char *)&v + i * 16, table, 16);
    return v;
}

INLINE vi look_up(vi table, vi codes) {
#if PB_AVX512
    return (vi)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif PB_AVX2
    return (vi)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif PB_NEON
    return (vi)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#else
    uint8_t from[W * 4], at[W * 4];
    memcpy(from, &table, sizeof from);
    memcpy(at, &codes, sizeof at);
    for (int i = 0; i < W * 4; i++) at[i] = from[at[i]];
    return viload(at);
#endif
}

#define EACH_BYTE(bits) ((vi){} + (int)((bits) * 0x01010101u))
#define EACH_PAIR(bits) ((vi){} + (int)((bits) * 0x00010001u))

/* (a & mask) | b */
INLINE vi join_bits(vi a, vi mask, vi b) {
#if PB_AVX512
    return (vi)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)mask, (__m512i)b, 0xea);
#else
    return (a & mask) | b;
#endif
}

/* The vector at p, which is loaded once however often it is used. */
INLINE vi load_once(const char *p) {
    vi v = viload(p);
#if PB_AVX512
    __asm__("" : "+v"(v));
#endif
    return v;
}

/* Codes of quad q of a group, those of lanes v * W on: four bytes in each. */
INLINE vi code_quad(const char *group, int v, int codes, int q, vi table) {
#define CODE_LINE(i) load_once(group + (i) * LINE + v * W * 4)
    vi low, high;
    switch (codes) {
    case CODES_2: return CODE_LINE(q / 4) >> q % 4 * 2 & EACH_BYTE(3);
    case CODES_3:
        low = CODE_LINE(1 + q / 4) >> q % 4 * 2 & EACH_BYTE(3), high = CODE_LINE(0);
        return join_bits(q < 2 ? high << (2 - q) : high >> (q - 2), EACH_BYTE(4), low);
    case CODES_4: return CODE_LINE(q / 2) >> q % 2 * 4 & EACH_BYTE(15);
    case CODES_TABLE: return look_up(table, CODE_LINE(q / 2) >> q % 2 * 4 & EACH_BYTE(15));
    case CODES_5:
        low = CODE_LINE(1 + q / 2) >> q % 2 * 4 & EACH_BYTE(15), high = CODE_LINE(0);
        return join_bits(q < 4 ? high << (4 - q) : high >> (q - 4), EACH_BYTE(16), low);
    case CODES_6:
        low = CODE_LINE(1 + q / 4 + q / 2) >> q % 2 * 4 & EACH_BYTE(15), high = CODE_LINE(q / 4 * 3);
        high = q % 4 < 2 ? high << (4 - q % 4 * 2) : high >> (q % 4 * 2 - 4);
        return join_bits(high, EACH_BYTE(48), low);
    default: return CODE_LINE(q);
    }
}

/* The same as two vectors of pairs: the first and the third of the four, the second and the fourth. */
INLINE void code_pairs(vi pairs[2], const char *group, int v, int codes, int q, vi table) {
    if (codes == CODES_4) { /* without bytes in between */
        vu line = (vu)CODE_LINE(q / 2);
        pairs[0] = (vi)(line >> q % 2 * 4) & EACH_PAIR(15);
        pairs[1] = q % 2 ? (vi)(line >> 12) : (vi)(line >> 8) & EACH_PAIR(15);
        return;
    }
    vi quad = code_quad(group, v, codes, q, table);
    pairs[0] = quad & EACH_PAIR(255);
    pairs[1] = (vi)((vu)quad >> 8);
}
#undef CODE_LINE

#endif
