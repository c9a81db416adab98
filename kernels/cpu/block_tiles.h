/* Products of a few rows with a block of a panel, whose sums are registers.
 *
 * Of each run of k with one weight scale, the sum of the products with codes is exact in 32 bits; as float it is
 * multiplied with the scale and added to the block's sum, with the minimum times the numbers' sum after it, and the
 * block's sum times the activations' scale to the output's. Numbers of 8 bits have scales of their own in a block, with
 * which a run's products are multiplied first. Every tile does the same, so a row has the same bits in each.
 */
#ifndef PB_BLOCK_TILES_H
#define PB_BLOCK_TILES_H

#include "block_rows.h"

enum {
    FEW_ROWS = 4,                       /* rows of a tile that takes codes apart in registers */
    TILE_ROWS = MR < 6 ? MR : 6,        /* of one to which they come widened */
    COLUMNS = LANES / W,                /* vectors of outputs in a panel, */
    TILE_COLUMNS = COLUMNS < 2 ? 1 : 2, /* and those that a tile has sums for */
    FEW_MODE = PB_BYTE_DOT ? BYTES : PAIRS,
};

INLINE vi start_of(const block_rows *x, int row, int64_t run, int minima) {
    return minima ? (vi){} : (vi){} + x->sums[row * x->runs + run];
}

/* A run's products with column v, added to the sum of its block. */
INLINE vf add_run(vf sum, vi products, const block_rows *x, int row, int64_t run, int run_k, const float *scales,
                  const float *minima, int v, int mode) {
    vf all = __builtin_convertvector(products, vf);
    if (mode == ONE_BYTE) all = all * vset1(x->scales[row * x->scaled + run * run_k / GROUP_K]);
    sum = vfma(all, vload(scales + run * LANES + v * W), sum);
    if (!minima) return sum;
    float of_row;
    memcpy(&of_row, x->sums + row * x->runs + run, 4);
    return vfma(vset1(of_row), vload(minima + run * LANES + v * W), sum);
}

INLINE void add_block(float *total, vf sum, const block_rows *x, int row, int mode) {
    vf before = vload(total);
    vstore(total, mode == ONE_BYTE ? before + sum : vfma(sum, vset1(x->scales[row * x->scaled]), before));
}

/* Four bytes at p in every lane. */
INLINE vi four_of(const char *p) { return pair_of((const int16_t *)p); }

/* code_quad() as bytes are multiplied. */
INLINE vi byte_codes(const char *group, int v, int kind, int q, vi table) {
    vi quad = code_quad(group, v, kind, q, table);
    return PB_SIGNED_CODES && any_byte(kind) ? quad ^ EACH_BYTE(0x80) : quad;
}

/* Products of one row by one column. There are several sums for one or two rows, added at the end, as one alone would
 * wait for each product before the next; those of low and high bytes are apart in any case. */
typedef struct {
    vi parts[4];
} few_sum;

/* Four codes of each lane times four numbers: as bytes codes[0], or as pairs. */
INLINE void add_quad(few_sum *sum, const vi codes[2], const char *numbers, int chain, int mode) {
    if (mode == PAIRS) {
        vi *part = &sum->parts[chain];
        *part = vdot(*part, four_of(numbers), codes[0]);
        *part = vdot(*part, four_of(numbers + 4), codes[1]);
    } else if (mode == BYTES)
        vdot_low_and_high(&sum->parts[chain * 2], &sum->parts[chain * 2 + 1], codes[0], numbers);
    else
        sum->parts[chain * 2] = vdot_bytes(sum->parts[chain * 2], codes[0], four_of(numbers));
}

INLINE vi end_few(const few_sum *sum, int chains, int mode) {
    const int apart = mode == PAIRS ? 1 : 2;
    vi low = sum->parts[0], high = sum->parts[1];
    if (chains == 2) low += sum->parts[apart], high += sum->parts[3];
    return mode == BYTES ? low + (high << 8) : low;
}

/* Ask for the lines that are ``ahead`` bytes on from those of quad q of a group. */
INLINE void fetch_quad(const char *group, int64_t ahead, int q, int bits) {
    const int lines = bits * LINE / 64;
#pragma GCC unroll 4
    for (int i = lines * q / QUADS; i < lines * (q + 1) / QUADS; i++) __builtin_prefetch(group + ahead + i * 64);
}

/* totals [rows][LANES] += a block of some groups times codes as they are packed. Where these are read from the cache
 * for a second time, no processor foresees what comes next: then ``ahead``, else 0, is how many bytes on that is. */
INLINE void few_tile(const block_rows *x, const char *codes, int64_t ahead, int64_t groups, vi table,
                     const float *scales, const float *minima, float *totals, int rows, int kind, int mode) {
    const int run_quads = scaled_k(kind) / 4, chains = rows > 2 ? 1 : 2;
    for (int first = 0; first < COLUMNS; first += TILE_COLUMNS) {
        vf sums[FEW_ROWS][TILE_COLUMNS] = {};
        const char *group = codes, *numbers = x->numbers;
        int64_t run = 0;
        for (int64_t g = 0; g < groups; g++, group += code_bits(kind) * LINE)
#pragma GCC unroll 2
            for (int part = 0; part < QUADS / run_quads; part++, run++) {
                few_sum products[FEW_ROWS][TILE_COLUMNS];
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                    for (int v = 0; v < TILE_COLUMNS; v++) products[r][v] = (few_sum){{start_of(x, r, run, !!minima)}};
#pragma GCC unroll 8
                for (int i = 0; i < run_quads; i++, numbers += bytes_of_four(mode)) {
                    vi four[TILE_COLUMNS][2];
                    if (ahead && first == 0) fetch_quad(group, ahead, part * run_quads + i, code_bits(kind));
#pragma GCC unroll 2
                    for (int v = 0; v < TILE_COLUMNS; v++) {
                        int q = part * run_quads + i;
                        if (mode == PAIRS) code_pairs(four[v], group, first + v, kind, q, table);
                        else four[v][0] = byte_codes(group, first + v, kind, q, table);
                    }
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                        for (int v = 0; v < TILE_COLUMNS; v++)
                            add_quad(&products[r][v], four[v], numbers + r * x->stride, i % chains, mode);
                }
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                    for (int v = 0; v < TILE_COLUMNS; v++)
                        sums[r][v] = add_run(sums[r][v], end_few(&products[r][v], chains, mode), x, r, run,
                                             run_quads * 4, scales, minima, first + v, mode);
            }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < TILE_COLUMNS; v++)
                add_block(totals + r * LANES + (first + v) * W, sums[r][v], x, r, mode);
    }
}

/* The same with codes that were widened: of each quad two lines of pairs, or one of bytes. */
INLINE void wide_tile(const block_rows *x, const char *wide, int64_t runs, int run_k, const float *scales,
                      const float *minima, float *totals, int rows, int mode) {
    const int lines = mode == ONE_BYTE ? 1 : 2;
    for (int first = 0; first < COLUMNS; first += TILE_COLUMNS) {
        vf sums[TILE_ROWS][TILE_COLUMNS] = {};
        const char *w = wide + first * W * 4, *numbers = x->numbers;
        for (int64_t run = 0; run < runs; run++) {
            vi products[TILE_ROWS][TILE_COLUMNS];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int v = 0; v < TILE_COLUMNS; v++) products[r][v] = start_of(x, r, run, !!minima);
            for (int64_t i = 0; i < run_k / 4 * lines; i += 4)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++, w += LINE, numbers += 4) {
                    vi codes[TILE_COLUMNS];
#pragma GCC unroll 2
                    for (int v = 0; v < TILE_COLUMNS; v++) codes[v] = viload(w + v * W * 4);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        vi four = four_of(numbers + r * x->stride);
#pragma GCC unroll 2
                        for (int v = 0; v < TILE_COLUMNS; v++)
                            products[r][v] = mode == ONE_BYTE ? vdot_bytes(products[r][v], codes[v], four)
                                                              : vdot(products[r][v], four, codes[v]);
                    }
                }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int v = 0; v < TILE_COLUMNS; v++)
                    sums[r][v] = add_run(sums[r][v], products[r][v], x, r, run, run_k, scales, minima, first + v, mode);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < TILE_COLUMNS; v++)
                add_block(totals + r * LANES + (first + v) * W, sums[r][v], x, r, mode);
    }
}

INLINE void widen_codes(char *wide, const char *codes, int64_t groups, vi table, int kind, int mode) {
    const int lines = mode == ONE_BYTE ? 1 : 2;
    for (int64_t g = 0; g < groups; g++, codes += code_bits(kind) * LINE)
#pragma GCC unroll 8
        for (int q = 0; q < QUADS; q++, wide += lines * LINE)
#pragma GCC unroll 4
            for (int v = 0; v < COLUMNS; v++) {
                vi four[2];
                if (mode == PAIRS) code_pairs(four, codes, v, kind, q, table);
                else four[0] = byte_codes(codes, v, kind, q, table);
                for (int i = 0; i < lines; i++) memcpy(wide + i * LINE + v * W * 4, &four[i], sizeof four[i]);
            }
}

/* One function for each kind of codes and number of rows: a few rows with codes as packed, widening, and rows by wide
 * codes. */
typedef void few_function(const block_rows *, const char *, int64_t, int64_t, vi, const float *, const float *,
                          float *);
typedef void widen_function(char *, const char *, int64_t, vi);
typedef void wide_function(const block_rows *, const char *, int64_t, int, const float *, const float *, float *);
#define EACH_KIND(X, mode) \
    X(CODES_2, mode) X(CODES_3, mode) X(CODES_4, mode) X(CODES_TABLE, mode) X(CODES_5, mode) X(CODES_6, mode) \
    X(CODES_8, mode)
#define FEW_TILE(kind, mode, rows) \
    static void few_##kind##_##mode##_##rows(const block_rows *x, const char *codes, int64_t ahead, int64_t groups, \
                                             vi table, const float *scales, const float *minima, float *totals) { \
        few_tile(x, codes, ahead, groups, table, scales, minima, totals, rows, kind, mode); \
    }
#define FEW_TILES(kind, mode) \
    FEW_TILE(kind, mode, 1) FEW_TILE(kind, mode, 2) FEW_TILE(kind, mode, 3) FEW_TILE(kind, mode, 4)
#define FEW_ENTRY(kind, mode) \
    {few_##kind##_##mode##_1, few_##kind##_##mode##_2, few_##kind##_##mode##_3, few_##kind##_##mode##_4},
#define WIDEN(kind, mode) \
    static void widen_##kind##_##mode(char *wide, const char *codes, int64_t groups, vi table) { \
        widen_codes(wide, codes, groups, table, kind, mode); \
    }
#define WIDEN_ENTRY(kind, mode) widen_##kind##_##mode,
#define WIDE_TILE(mode, rows) \
    static void wide_##mode##_##rows(const block_rows *x, const char *wide, int64_t runs, int run_k, \
                                     const float *scales, const float *minima, float *totals) { \
        wide_tile(x, wide, runs, run_k, scales, minima, totals, rows, mode); \
    }
#define WIDE_ENTRY(mode, rows) wide_##mode##_##rows,
#if MR >= 6
#define EACH_ROWS(X, mode) X(mode, 1) X(mode, 2) X(mode, 3) X(mode, 4) X(mode, 5) X(mode, 6)
#else
#define EACH_ROWS(X, mode) X(mode, 1) X(mode, 2) X(mode, 3) X(mode, 4)
#endif

EACH_KIND(WIDEN, PAIRS)
EACH_ROWS(WIDE_TILE, PAIRS)
#if PB_BYTE_DOT
EACH_KIND(FEW_TILES, BYTES)
#else
EACH_KIND(FEW_TILES, PAIRS)
#endif
#if PB_ANY_BYTE_DOT
EACH_KIND(FEW_TILES, ONE_BYTE)
EACH_KIND(WIDEN, ONE_BYTE)
EACH_ROWS(WIDE_TILE, ONE_BYTE)
#endif

/* By mode of the numbers. */
static few_function *const few_tiles[MODES][CODE_KINDS][FEW_ROWS] = {
#if PB_BYTE_DOT
    [BYTES] = {EACH_KIND(FEW_ENTRY, BYTES)},
#else
    [PAIRS] = {EACH_KIND(FEW_ENTRY, PAIRS)},
#endif
#if PB_ANY_BYTE_DOT
    [ONE_BYTE] = {EACH_KIND(FEW_ENTRY, ONE_BYTE)},
#endif
};
static widen_function *const widen[MODES][CODE_KINDS] = {
    [PAIRS] = {EACH_KIND(WIDEN_ENTRY, PAIRS)},
#if PB_ANY_BYTE_DOT
    [ONE_BYTE] = {EACH_KIND(WIDEN_ENTRY, ONE_BYTE)},
#endif
};
static wide_function *const wide_tiles[MODES][TILE_ROWS] = {
    [PAIRS] = {EACH_ROWS(WIDE_ENTRY, PAIRS)},
#if PB_ANY_BYTE_DOT
    [ONE_BYTE] = {EACH_ROWS(WIDE_ENTRY, ONE_BYTE)},
#endif
};

#endif
