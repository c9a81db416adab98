/* Linear layers on weights in GGML's block formats, which stay as they are: codes are multiplied, not what they stand for.
 *
 * Activations have 16 bits and one scale per BLOCK of a row. Of each run of k with one weight scale, the sum of the
 * products with codes is exact in 32 bits; as float it is multiplied with the scale and added to the block's sum, with
 * the minimum times the activations' sum after it, and the block's sum times the activations' scale to the output's. So
 * every output has one order of additions, and integer sums are exact in any. A few rows take codes apart in registers;
 * for more, a block of a panel is widened to 16 bits in the cache, where all of them use it.
 */
#include "blocks.h"
#include "threads.h"

#ifndef PB_NEON
#define PB_NEON 0
#endif

enum {
    FEW_ROWS = 4,        /* rows of a tile that takes codes apart in registers */
    FEW_TILES = 3,       /* the most such tiles; for more rows codes are widened */
    TILE_ROWS = MR < 6 ? MR : 6,
    ROW_BLOCK = 20 * TILE_ROWS,
    MOST_PANELS = 4,     /* panels of an item, which take their turns at a block's activations */
    ITEMS_PER_THREAD = 4,
    LARGEST = 127 * 257, /* of an activation, two signed bytes; 255 * LARGEST * 32 < 2^31 */
    COLUMNS = LANES / W, /* vectors of outputs in a panel, */
    TILE_COLUMNS = COLUMNS < 2 ? 1 : 2, /* and those that a tile has sums for */
    SMALL_WORK = 100 * 1000,
};

/* Activations of some rows: 16-bit numbers [row][k], of four k the first, the third, the second and the fourth, as
 * code_pairs() has them, or their low bytes, then their high ones, if ``bytes`` are multiplied; a scale per BLOCK; per run of k the sum, as a float where the format has minima, else times the
 * negative offset as an integer, with which the products' sum begins. */
typedef struct {
    const int16_t *numbers;
    const int32_t *sums;
    const float *scales;
    int64_t k, runs, blocks;
} rows_view;

typedef struct {
    linear_job linear;
    const block_format *format;
    int16_t *numbers;
    int32_t *sums;
    float *scales;
    int64_t runs, blocks, panels; /* of a row, of a row, of an item */
    int few;                      /* rows, so that codes are taken apart in registers */
} blocks_job;

/* Round to nearest; |x| <= 2^22. */
INLINE vi nearest(vf x) {
    const vf magic = vset1(12582912.0f);
    return as_vi(x + magic) - as_vi(magic);
}

static void prepare_row(const void *context, int64_t row) {
    const blocks_job *job = context;
    const int64_t k = job->linear.k, run = scaled_k(job->format->codes);
    const float *x = job->linear.x + row * k;
    int16_t *out = job->numbers + row * k;
    int32_t *sums = job->sums + row * job->runs, number[BLOCK];
    for (int64_t block = 0; block < job->blocks; block++) {
        int64_t count = k - block * BLOCK < BLOCK ? k - block * BLOCK : BLOCK;
        vf top = vset1(0x1p-100f), bad = {}; /* what is smaller need not be told from zero */
        for (int64_t i = 0; i < count; i += W) {
            vf v = vload(x + i);
            top = vmax(vabs(v), top);
            bad = vfma(v, (vf){}, bad);
        }
        float most = vmaximum(top), inverse = (float)LARGEST / most;
        job->scales[row * job->blocks + block] = most / (float)LARGEST + vsum(bad);
        for (int64_t i = 0; i < count; i += W) {
            vi rounded = nearest(vload(x + i) * inverse);
            memcpy(number + i, &rounded, sizeof rounded);
        }
        for (int64_t i = 0; i < count; i += 4) {
            if (job->few && PB_BYTE_DOT) {
                int8_t *bytes = (int8_t *)(out + i);
                for (int j = 0; j < 4; j++) {
                    bytes[j] = (int8_t)number[i + j];
                    bytes[4 + j] = (int8_t)((number[i + j] - bytes[j]) >> 8);
                }
                continue;
            }
            out[i] = (int16_t)number[i], out[i + 1] = (int16_t)number[i + 2];
            out[i + 2] = (int16_t)number[i + 1], out[i + 3] = (int16_t)number[i + 3];
        }
        for (int64_t i = 0; i < count; i += run, sums++) {
            int32_t sum = 0;
            for (int64_t j = 0; j < run; j++) sum += number[i + j];
            float as_float = (float)sum;
            *sums = -job->format->offset * sum;
            if (has_minima(job->format)) memcpy(sums, &as_float, 4);
        }
        x += count, out += count;
    }
}

INLINE vi start_of(const rows_view *x, int row, int64_t run, int minima) {
    return minima ? (vi){} : (vi){} + x->sums[row * x->runs + run];
}

/* A run's products with column v, added to the sum of its block. */
INLINE vf add_run(vf sum, vi products, const rows_view *x, int row, int64_t run, const float *scales,
                  const float *minima, int v) {
    sum = vfma(__builtin_convertvector(products, vf), vload(scales + run * LANES + v * W), sum);
    if (!minima) return sum;
    float of_row;
    memcpy(&of_row, x->sums + row * x->runs + run, 4);
    return vfma(vset1(of_row), vload(minima + run * LANES + v * W), sum);
}

INLINE void add_block(float *total, vf sum, const rows_view *x, int row) {
    vstore(total, vfma(sum, vset1(x->scales[row * x->blocks]), vload(total)));
}

/* Sums of products with codes of a few rows by some columns. A few sums are kept for one and added at the end, as one
 * alone would wait for each product before the next. Where bytes can be multiplied, those of an activation's low and
 * high byte are such sums, and codes need not be split. */
typedef struct {
    vi parts[4];
} few_sum;

INLINE few_sum start_few(vi start) { return (few_sum){{start}}; }

INLINE void add_quad(few_sum *sum, const vi codes[2], const vi numbers[2], int chain) {
#if PB_BYTE_DOT
    sum->parts[chain * 2] = vdot_bytes(sum->parts[chain * 2], codes[0], numbers[0]);
    sum->parts[chain * 2 + 1] = vdot_bytes(sum->parts[chain * 2 + 1], codes[0], numbers[1]);
#else
    sum->parts[chain] = vdot(sum->parts[chain], numbers[0], codes[0]);
    sum->parts[chain] = vdot(sum->parts[chain], numbers[1], codes[1]);
#endif
}

INLINE vi end_few(const few_sum *sum, int chains) {
#if PB_BYTE_DOT
    vi low = sum->parts[0], high = sum->parts[1];
    if (chains == 2) low += sum->parts[2], high += sum->parts[3];
    return low + (high << 8);
#else
    return chains == 2 ? sum->parts[0] + sum->parts[1] : sum->parts[0];
#endif
}

/* totals [rows][LANES] += a block of some groups times codes as they are packed. */
INLINE void few_tile(const rows_view *x, const char *codes, int64_t groups, vi table, const float *scales,
                     const float *minima, float *totals, int rows, int kind) {
    const int run_quads = scaled_k(kind) / 4, bytes = code_bits(kind) * LINE, chains = rows > 2 ? 1 : 2;
    for (int first = 0; first < COLUMNS; first += TILE_COLUMNS) {
        vf sums[FEW_ROWS][TILE_COLUMNS] = {};
        const char *group = codes;
        int64_t run = 0;
        for (int64_t g = 0; g < groups; g++, group += bytes) {
#pragma GCC unroll 2
            for (int part = 0; part < QUADS / run_quads; part++, run++) {
                few_sum products[FEW_ROWS][TILE_COLUMNS];
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                    for (int v = 0; v < TILE_COLUMNS; v++) products[r][v] = start_few(start_of(x, r, run, !!minima));
#pragma GCC unroll 8
                for (int i = 0; i < run_quads; i++) {
                    int q = part * run_quads + i;
                    const int16_t *at = x->numbers + g * GROUP_K + q * 4;
                    vi four[TILE_COLUMNS][2];
#pragma GCC unroll 2
                    for (int v = 0; v < TILE_COLUMNS; v++) {
                        if (PB_BYTE_DOT) four[v][0] = code_quad(group, first + v, kind, q, table);
                        else code_pairs(four[v], group, first + v, kind, q, table);
                    }
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++) {
                        vi numbers[2] = {pair_of(at + r * x->k), pair_of(at + r * x->k + 2)};
#pragma GCC unroll 2
                        for (int v = 0; v < TILE_COLUMNS; v++) add_quad(&products[r][v], four[v], numbers, i % chains);
                    }
                }
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                    for (int v = 0; v < TILE_COLUMNS; v++)
                        sums[r][v] = add_run(sums[r][v], end_few(&products[r][v], chains), x, r, run, scales, minima,
                                             first + v);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < TILE_COLUMNS; v++) add_block(totals + r * LANES + (first + v) * W, sums[r][v], x, r);
    }
}

/* The same with codes that were widened: pairs [k / 2][LANES]. */
INLINE void wide_tile(const rows_view *x, const int16_t *wide, int64_t runs, int64_t run_k, const float *scales,
                      const float *minima, float *totals, int rows) {
    for (int first = 0; first < COLUMNS; first += TILE_COLUMNS) {
        vf sums[TILE_ROWS][TILE_COLUMNS] = {};
        const int16_t *w = wide + first * W * 2, *at = x->numbers;
        for (int64_t run = 0; run < runs; run++) {
            vi products[TILE_ROWS][TILE_COLUMNS];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int v = 0; v < TILE_COLUMNS; v++) products[r][v] = start_of(x, r, run, !!minima);
            for (int64_t i = 0; i < run_k; i += 8)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++, w += LANES * 2, at += 2) {
                    vi pairs[TILE_COLUMNS];
#pragma GCC unroll 2
                    for (int v = 0; v < TILE_COLUMNS; v++) pairs[v] = viload(w + v * W * 2);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        vi a = pair_of(at + r * x->k);
#pragma GCC unroll 2
                        for (int v = 0; v < TILE_COLUMNS; v++) products[r][v] = vdot(products[r][v], a, pairs[v]);
                    }
                }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int v = 0; v < TILE_COLUMNS; v++)
                    sums[r][v] = add_run(sums[r][v], products[r][v], x, r, run, scales, minima, first + v);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < TILE_COLUMNS; v++) add_block(totals + r * LANES + (first + v) * W, sums[r][v], x, r);
    }
}

INLINE void widen_codes(int16_t *wide, const char *codes, int64_t groups, vi table, int kind) {
    for (int64_t g = 0; g < groups; g++, codes += code_bits(kind) * LINE)
#pragma GCC unroll 8
        for (int q = 0; q < QUADS; q++, wide += 4 * LANES)
#pragma GCC unroll 4
            for (int v = 0; v < COLUMNS; v++) {
                vi pairs[2];
                code_pairs(pairs, codes, v, kind, q, table);
                memcpy(wide + v * W * 2, &pairs[0], sizeof pairs[0]);
                memcpy(wide + (LANES + v * W) * 2, &pairs[1], sizeof pairs[1]);
            }
}

/* One function for each kind of codes and number of rows, so that sums are registers. */
typedef void few_function(const rows_view *, const char *, int64_t, vi, const float *, const float *, float *);
typedef void wide_function(const rows_view *, const int16_t *, int64_t, int64_t, const float *, const float *, float *);
typedef void widen_function(int16_t *, const char *, int64_t, vi);
#define EACH_KIND(X) X(CODES_2) X(CODES_3) X(CODES_4) X(CODES_TABLE) X(CODES_5) X(CODES_6) X(CODES_8)
#define FEW_TILE(kind, rows) \
    static void few_##kind##_##rows(const rows_view *x, const char *codes, int64_t groups, vi table, \
                                    const float *scales, const float *minima, float *totals) { \
        few_tile(x, codes, groups, table, scales, minima, totals, rows, kind); \
    }
#define WIDEN(kind) \
    static void widen_##kind(int16_t *wide, const char *codes, int64_t groups, vi table) { \
        widen_codes(wide, codes, groups, table, kind); \
    } \
    FEW_TILE(kind, 1) FEW_TILE(kind, 2) FEW_TILE(kind, 3) FEW_TILE(kind, 4)
#define WIDE_TILE(rows) \
    static void wide_##rows(const rows_view *x, const int16_t *wide, int64_t runs, int64_t run_k, \
                            const float *scales, const float *minima, float *totals) { \
        wide_tile(x, wide, runs, run_k, scales, minima, totals, rows); \
    }
#if MR >= 6
#define EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
#define EACH_ROWS(X) X(1) X(2) X(3) X(4)
#endif
EACH_KIND(WIDEN)
EACH_ROWS(WIDE_TILE)
#define WIDEN_ENTRY(kind) widen_##kind,
#define FEW_ENTRY(kind) {few_##kind##_1, few_##kind##_2, few_##kind##_3, few_##kind##_4},
#define WIDE_ENTRY(rows) wide_##rows,
static widen_function *const widen[CODE_KINDS] = {EACH_KIND(WIDEN_ENTRY)};
static few_function *const few_tiles[CODE_KINDS][FEW_ROWS] = {EACH_KIND(FEW_ENTRY)};
static wide_function *const wide_tiles[TILE_ROWS] = {EACH_ROWS(WIDE_ENTRY)};

/* What a block of a panel is taken apart to. */
typedef struct {
    _Alignas(64) int16_t codes[BLOCK * LANES];
    _Alignas(64) float scales[MOST_SCALES * LANES], minima[MOST_SCALES * LANES];
} wide_block;

INLINE rows_view view_of(const blocks_job *job, int64_t row, int64_t block) {
    int64_t k = job->linear.k, run_of_block = block * BLOCK / scaled_k(job->format->codes);
    return (rows_view){job->numbers + row * k + block * BLOCK, job->sums + row * job->runs + run_of_block,
                       job->scales + row * job->blocks + block, k, job->runs, job->blocks};
}

/* totals [panels][rows][LANES] += one block of some panels times rows from ``first`` on; the next block is ``step``
 * bytes on in each panel. */
static void many_rows(const blocks_job *job, wide_block *wide, const char *w, int64_t step, int64_t panels, int64_t block,
                      int64_t groups, int64_t first, int64_t rows, float *totals) {
    const block_format *f = job->format;
    const int64_t run_k = scaled_k(f->codes), tiles = ceil_div(rows, TILE_ROWS);
    const vi table = load_table(f->table);
    for (int64_t p = 0; p < panels; p++) {
        const char *from = w + p * step;
        pb_block_scales(f, from, groups, wide[p].scales, wide[p].minima);
        widen[f->codes](wide[p].codes, from + block_head(f, groups), groups, table);
    }
    for (int64_t i = 0; i < tiles; i++) {
        int64_t from = rows * i / tiles, to = rows * (i + 1) / tiles;
        rows_view x = view_of(job, first + from, block);
        for (int64_t p = 0; p < panels; p++)
            wide_tiles[to - from - 1](&x, wide[p].codes, groups * GROUP_K / run_k, run_k, wide[p].scales,
                                      has_minima(f) ? wide[p].minima : NULL, totals + (p * rows + from) * LANES);
    }
}

static void few_rows(const blocks_job *job, const char *w, int64_t block, int64_t groups, float *totals) {
    const block_format *f = job->format;
    _Alignas(64) float scales[MOST_SCALES * LANES], minima[MOST_SCALES * LANES];
    pb_block_scales(f, w, groups, scales, minima);
    const int64_t rows = job->linear.m, tiles = ceil_div(rows, FEW_ROWS);
    for (int64_t i = 0; i < tiles; i++) {
        int64_t from = rows * i / tiles, to = rows * (i + 1) / tiles;
        rows_view x = view_of(job, from, block);
        few_tiles[f->codes][to - from - 1](&x, w + block_head(f, groups), groups, load_table(f->table), scales,
                                           has_minima(f) ? minima : NULL, totals + from * LANES);
    }
}

static void store_blocks(const linear_job *l, int64_t panel, int64_t first, int64_t rows, const float *totals) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = 0; at < LANES; at += W) {
            int64_t output = panel * LANES + at, left = l->n - output;
            if (left <= 0) break;
            int count = left < W ? (int)left : W;
            vf value = vload(totals + r * LANES + at);
            if (l->bias) value = value + vload_n(l->bias + output, count);
            vstore_n(l->out + (first + r) * l->n + output, value, count);
        }
}

/* Item: a block of rows by a few panels. */
static void blocks_item(const void *context, int64_t item) {
    const blocks_job *job = context;
    const linear_job *l = &job->linear;
    const block_format *f = job->format;
    int64_t all = block_panels(l->n), turns = ceil_div(all, job->panels), panel = item % turns * job->panels;
    int64_t panels = all - panel < job->panels ? all - panel : job->panels, first = item / turns * ROW_BLOCK;
    int64_t rows = l->m - first < ROW_BLOCK ? l->m - first : ROW_BLOCK, step = blocks_panel_bytes(f, l->k);
    const char *w = (const char *)l->weights + panel * step;
    _Alignas(64) float totals[MOST_PANELS * ROW_BLOCK * LANES];
    wide_block *wide = job->few ? NULL : pb_thread_memory(ITEM_MEMORY, MOST_PANELS * sizeof *wide);
    memset(totals, 0, sizeof(float) * (size_t)(panels * rows * LANES));
    for (int64_t block = 0; block < job->blocks; block++) {
        int64_t rest = (l->k - block * BLOCK) / GROUP_K, groups = rest < BLOCK_GROUPS ? rest : BLOCK_GROUPS;
        if (!job->few) many_rows(job, wide, w, step, panels, block, groups, first, rows, totals);
        else few_rows(job, w, block, groups, totals);
        w += block_bytes(f, groups);
    }
    for (int64_t p = 0; p < panels; p++) store_blocks(l, panel + p, first, rows, totals + p * rows * LANES);
}

/* out [M, N] = x [M, K] @ W.T + bias [N] (or NULL), W as pb_pack_blocks() leaves it. */
EXPORT void pb_linear_blocks(const float *x, const void *weights, const float *bias, float *out, int64_t m, int64_t n,
                             int64_t k, int64_t format, int64_t threads) {
    blocks_job job = {.linear = {x, weights, bias, out, m, n, k, (int)threads}, .format = pb_block_format(format)};
    if (m * n * k < SMALL_WORK) job.linear.threads = 1;
    job.runs = k / scaled_k(job.format->codes);
    job.blocks = ceil_div(k, BLOCK);
    job.numbers = pb_thread_memory(CALLER_MEMORY, m * (2 * k + 4 * job.runs + 4 * job.blocks));
    job.sums = (int32_t *)(job.numbers + m * k);
    job.scales = (float *)(job.sums + m * job.runs);
    job.panels = 1;
    job.few = m <= FEW_ROWS * FEW_TILES;
    if (!job.few)
        while (job.panels < MOST_PANELS &&
               ceil_div(block_panels(n), 2 * job.panels) * ceil_div(m, ROW_BLOCK) >= ITEMS_PER_THREAD * job.linear.threads)
            job.panels *= 2;
    pb_parallel(prepare_row, &job, m, m * k < 1 << 16 ? 1 : job.linear.threads);
    pb_parallel(blocks_item, &job, ceil_div(m, ROW_BLOCK) * ceil_div(block_panels(n), job.panels), job.linear.threads);
}
