/* Putting a file's blocks in the order that linear_blocks.c reads: nothing is computed, bits are moved.
 *
 * Codes go four at a time, a byte of a word for each.
 */
#include "blocks.h"
#include "threads.h"

/* A block of one output as the file has it, taken apart. */
typedef struct {
    uint32_t quads[BLOCK / 4]; /* codes of four consecutive k, moved up by the offset unless they go to a table */
    uint8_t factors[4];        /* fp16: the scale and the minimum, or what all of them are multiplied with */
    uint8_t scales[MOST_SCALES], minima[MOST_SCALES];
} parts;

#define EACH(bits) ((uint32_t)(bits) * 0x01010101u)

INLINE uint32_t word_at(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}

/* The low four bits of ``bits``, each in the lowest of a byte. */
INLINE uint32_t spread(uint32_t bits) { return (bits & 15) * 0x00204081u & EACH(1); }

/* 16 bytes: first their low halves, then their high ones. */
static void nibbles(const uint8_t *bytes, uint32_t *quads) {
    for (int i = 0; i < 4; i++) {
        uint32_t word = word_at(bytes + 4 * i);
        quads[i] = word & EACH(15);
        quads[4 + i] = word >> 4 & EACH(15);
    }
}

static void take_small(const block_format *f, const uint8_t *b, parts *out) {
    if (f->scales == POWER) out->scales[0] = *b++;
    else {
        memcpy(out->factors, b, f->scales == HALF_MIN ? 4 : 2);
        b += f->scales == HALF_MIN ? 4 : 2;
    }
    if (f->codes == CODES_8) {
        for (int i = 0; i < 8; i++) out->quads[i] = word_at(b + 4 * i) ^ EACH(0x80);
        return;
    }
    uint32_t fifths = 0;
    if (f->codes == CODES_5) fifths = word_at(b), b += 4;
    nibbles(b, out->quads);
    for (int i = 0; i < 8; i++) out->quads[i] |= spread(fifths >> 4 * i) << 4;
}

/* Codes of 64 k at a time: 32 bytes of which first the low halves count, then the high ones. */
static void halves(const uint8_t *bytes, uint32_t *quads) {
    for (int i = 0; i < BLOCK / 8; i++) {
        uint32_t word = word_at(bytes + 4 * i), *at = quads + i / 8 * 16 + i % 8;
        at[0] = word & EACH(15);
        at[8] = word >> 4 & EACH(15);
    }
}

/* Codes of 128 k at a time: 32 bytes, two bits of each for the first 32 k, the next two for the next 32. */
static void quarters(const uint8_t *bytes, uint32_t *quads) {
    for (int i = 0; i < BLOCK / 4; i++)
        quads[i] = word_at(bytes + i / 32 * 32 + i % 8 * 4) >> i % 32 / 8 * 2 & EACH(3);
}

/* Q4_K and Q5_K: eight scales and minima of 6 bits in twelve bytes: four scales, four minima (their top 2 bits belong
 * to the second four), then the low halves of the second four of both. */
static void take_k_scales(const uint8_t *b, parts *out) {
    memcpy(out->factors, b, 4);
    for (int i = 0; i < 4; i++) {
        out->scales[i] = b[4 + i] & 63;
        out->minima[i] = b[8 + i] & 63;
        out->scales[4 + i] = (uint8_t)((b[12 + i] & 15) | (b[4 + i] >> 2 & 48));
        out->minima[4 + i] = (uint8_t)(b[12 + i] >> 4 | (b[8 + i] >> 2 & 48));
    }
}

static void take_large(const block_format *f, const uint8_t *b, parts *out) {
    switch (f->id) {
    case Q2_K:
        memcpy(out->scales, b, 16);
        quarters(b + 16, out->quads);
        memcpy(out->factors, b + 80, 4);
        break;
    case Q3_K:
        quarters(b + 32, out->quads);
        for (int i = 0; i < BLOCK / 4; i++) out->quads[i] |= (word_at(b + i % 8 * 4) >> i / 8 & EACH(1)) << 2;
        for (int i = 0; i < 16; i++) {
            int low = b[96 + i % 8] >> i / 8 * 4 & 15, high = b[104 + i % 4] >> i / 4 * 2 & 3;
            out->scales[i] = (uint8_t)((low | high << 4) - 32);
        }
        memcpy(out->factors, b + 108, 2);
        break;
    case Q4_K:
        take_k_scales(b, out);
        halves(b + 16, out->quads);
        break;
    case Q5_K:
        take_k_scales(b, out);
        halves(b + 48, out->quads);
        for (int i = 0; i < BLOCK / 4; i++) out->quads[i] |= (word_at(b + 16 + i % 8 * 4) >> i / 8 & EACH(1)) << 4;
        break;
    case Q6_K:
        for (int i = 0; i < BLOCK / 4; i++) {
            int half = i / 32, run = i % 32 / 8, at = i % 8 * 4;
            uint32_t low = word_at(b + half * 64 + run % 2 * 32 + at) >> run / 2 * 4 & EACH(15);
            out->quads[i] = low | (word_at(b + 128 + half * 32 + at) >> run * 2 & EACH(3)) << 4;
        }
        memcpy(out->scales, b + 192, 16);
        memcpy(out->factors, b + 208, 2);
        break;
    case IQ4_XS:
        memcpy(out->factors, b, 2);
        for (int i = 0; i < 8; i++) {
            int low = b[4 + i / 2] >> i % 2 * 4 & 15, high = (b[2] | b[3] << 8) >> 2 * i & 3;
            out->scales[i] = (uint8_t)((low | high << 4) - 32);
            nibbles(b + 8 + i * 16, out->quads + i * 8);
        }
    }
}

/* Some bits of quads, ``share`` of them to a line. */
static char *put_lines(char *line, int64_t lane, const uint32_t *quads, int count, int shift, int bits) {
    const int share = 8 / bits;
    for (int i = 0; i < count; i += share, line += LINE) {
        uint32_t word = 0;
        for (int j = 0; j < share; j++) word |= (quads[i + j] >> shift & EACH((1 << bits) - 1)) << bits * j;
        memcpy(line + lane * 4, &word, 4);
    }
    return line;
}

/* Codes of a GROUP of one output, as code_quad() takes them. */
static void put_codes(char *group, int64_t lane, const uint32_t *quads, int codes) {
    int bits = code_bits(codes), low = bits < 4 ? 2 : bits < 8 ? 4 : 8, rest = bits - low;
    int together = rest ? 8 / rest : QUADS; /* quads that share a line of the rest */
    for (int i = 0; i < QUADS; i += together, quads += together) {
        if (rest) group = put_lines(group, lane, quads, together, low, rest);
        group = put_lines(group, lane, quads, together, 0, low);
    }
}

/* Scales of a block of one output; those of small blocks are at run ``at`` of ``runs``. */
static void put_scales(const block_format *f, char *block, int64_t lane, int64_t at, int64_t runs, const parts *p) {
    if (f->scales == POWER) block[at * LANES + lane] = (char)p->scales[0];
    else if (f->scales <= HALF_MIN) {
        memcpy(block + (at * LANES + lane) * 2, p->factors, 2);
        if (f->scales == HALF_MIN) memcpy(block + ((runs + at) * LANES + lane) * 2, p->factors + 2, 2);
    } else {
        memcpy(block + lane * 2, p->factors, 2);
        if (f->scales != SUPER) memcpy(block + (LANES + lane) * 2, p->factors + 2, 2);
        char *fine = block + LANES * (f->scales == SUPER ? 2 : 4) + lane;
        for (int64_t i = 0; i < runs; i++) {
            fine[i * LANES] = (char)p->scales[i];
            if (f->scales == SUPER_MIN) fine[(runs + i) * LANES] = (char)p->minima[i];
        }
    }
}

typedef struct {
    char *packed;
    const uint8_t *source;
    const block_format *format;
    int64_t first, rows, k;
} pack_blocks_job;

static void pack_lane(const pack_blocks_job *job, int64_t row) {
    const block_format *f = job->format;
    const int64_t output = job->first + row, lane = output % LANES, k = job->k, line_bytes = code_bits(f->codes) * LINE;
    const uint8_t *from = job->source + row * (k / f->values) * f->bytes;
    char *block = job->packed + output / LANES * blocks_panel_bytes(f, k);
    for (int64_t first = 0; first < k; first += BLOCK) {
        int64_t count = k - first < BLOCK ? k - first : BLOCK, groups = count / GROUP_K;
        int64_t runs = count / scaled_k(f->codes);
        char *codes = block + block_head(f, groups);
        for (int64_t at = 0; at < count; at += f->values, from += f->bytes) {
            parts p;
            if (f->values < BLOCK) take_small(f, from, &p);
            else take_large(f, from, &p);
            put_scales(f, block, lane, at / GROUP_K, runs, &p);
            for (int64_t g = 0; g < f->values / GROUP_K; g++)
                put_codes(codes + (at / GROUP_K + g) * line_bytes, lane, p.quads + g * QUADS, f->codes);
        }
        block += block_bytes(f, groups);
    }
}

static void pack_blocks_panel(const void *context, int64_t item) {
    const pack_blocks_job *job = context;
    int64_t from = (job->first / LANES + item) * LANES - job->first, to = from + LANES;
    for (int64_t row = from < 0 ? 0 : from; row < to && row < job->rows; row++) pack_lane(job, row);
}

/* source: ``rows`` rows of k values in blocks as a file has them, which become the outputs from ``first`` on. What is
 * packed to is zero before. */
EXPORT void pb_pack_blocks(void *packed, const void *source, int64_t format, int64_t first, int64_t rows, int64_t k,
                           int64_t threads) {
    pack_blocks_job job = {packed, source, pb_block_format(format), first, rows, k};
    if (rows > 0)
        pb_parallel(pack_blocks_panel, &job, (first + rows - 1) / LANES - first / LANES + 1, (int)threads);
}
