/* Linear layers on weights in GGML's block formats as they are: codes are multiplied, not what they stand for.
 *
 * Activations have 16 bits and one scale per BLOCK of a row, or 8 bits and one per GROUP where bytes can be multiplied.
 * What an output's sum is made of is the same in all tiles (block_tiles.h), so a row's result depends on nothing but
 * the row. A few rows take codes apart in registers; for more, a block of a panel is widened in the cache, where all of
 * them use it.
 */
#include "block_tiles.h"
#include "threads.h"

enum {
    FEW_TILES = 6,              /* the most tiles that take codes apart; for more rows codes are widened */
    FEW_ONLY = PB_SIGNED_CODES, /* ARM's instructions multiply so many more bytes than pairs that nothing is widened */
    ROW_BLOCK = 20 * TILE_ROWS,
    SMALL_WORK = 100 * 1000,
};

typedef struct {
    linear_job linear;
    const block_format *format;
    block_rows rows;
    int mode, few;
} blocks_job;

/* What a block of a panel is taken apart to. */
typedef struct {
    _Alignas(64) char codes[BLOCK * LANES * 2];
    _Alignas(64) float scales[MOST_SCALES * LANES], minima[MOST_SCALES * LANES];
} wide_block;

/* Ask for a part of what will be read next. */
INLINE void fetch_part(const char *next, int64_t bytes, int64_t part, int64_t parts) {
    for (int64_t i = bytes / 64 * part / parts; i < bytes / 64 * (part + 1) / parts; i++)
        __builtin_prefetch(next + i * 64);
}

/* totals [rows][LANES] += one block of a panel times rows from ``first`` on. */
static void many_rows(const blocks_job *job, wide_block *wide, const char *w, int64_t block, int64_t groups,
                      int64_t first, int64_t rows, float *totals) {
    const block_format *f = job->format;
    const int64_t tiles = ceil_div(rows, TILE_ROWS), bytes = block_bytes(f, groups);
    const int run_k = scaled_k(f->codes);
    pb_block_scales(f, w, groups, wide->scales, wide->minima);
    widen[job->mode][f->codes](wide->codes, w + block_head(f, groups), groups, load_table(f->table));
    for (int64_t i = 0; i < tiles; i++) {
        int64_t from = rows * i / tiles, to = rows * (i + 1) / tiles;
        block_rows x = rows_from(&job->rows, f, job->mode, first + from, block);
        fetch_part(w + bytes, bytes, i, tiles);
        wide_tiles[job->mode][to - from - 1](&x, wide->codes, groups * GROUP_K / run_k, run_k, wide->scales,
                                             has_minima(f) ? wide->minima : NULL, totals + from * LANES);
    }
}

/* The same without widening. */
static void few_rows(const blocks_job *job, const char *w, int64_t block, int64_t groups, int64_t first, int64_t rows,
                     float *totals) {
    const block_format *f = job->format;
    const int64_t tiles = ceil_div(rows, FEW_ROWS), bytes = block_bytes(f, groups);
    _Alignas(64) float scales[MOST_SCALES * LANES], minima[MOST_SCALES * LANES];
    pb_block_scales(f, w, groups, scales, minima);
    for (int64_t i = 0; i < tiles; i++) {
        int64_t from = rows * i / tiles, to = rows * (i + 1) / tiles;
        block_rows x = rows_from(&job->rows, f, job->mode, first + from, block);
        few_tiles[job->mode][f->codes][to - from - 1](&x, w + block_head(f, groups), i == 1 ? bytes : 0, groups,
                                                      load_table(f->table), scales, has_minima(f) ? minima : NULL,
                                                      totals + from * LANES);
    }
}

static void store_outputs(const linear_job *l, int64_t panel, int64_t first, int64_t rows, const float *totals) {
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

/* Item: a block of rows by a panel. */
static void blocks_item(const void *context, int64_t item) {
    const blocks_job *job = context;
    const linear_job *l = &job->linear;
    const block_format *f = job->format;
    int64_t panels = block_panels(l->n), panel = item % panels, first = item / panels * ROW_BLOCK;
    int64_t rows = l->m - first < ROW_BLOCK ? l->m - first : ROW_BLOCK;
    const char *w = (const char *)l->weights + panel * blocks_panel_bytes(f, l->k);
    _Alignas(64) float totals[ROW_BLOCK * LANES];
    wide_block *wide = job->few ? NULL : pb_thread_memory(ITEM_MEMORY, sizeof *wide);
    memset(totals, 0, sizeof(float) * (size_t)(rows * LANES));
    for (int64_t block = 0; block * BLOCK < l->k; block++) {
        int64_t rest = (l->k - block * BLOCK) / GROUP_K, groups = rest < BLOCK_GROUPS ? rest : BLOCK_GROUPS;
        if (job->few) few_rows(job, w, block, groups, first, rows, totals);
        else many_rows(job, wide, w, block, groups, first, rows, totals);
        w += block_bytes(f, groups);
    }
    store_outputs(l, panel, first, rows, totals);
}

/* out [M, N] = x [M, K] @ W.T + bias [N] (or NULL), W as pb_pack_blocks() leaves it. bits: of an activation, 16 or, for
 * which not every processor has a use, 8. */
EXPORT void pb_linear_blocks(const float *x, const void *weights, const float *bias, float *out, int64_t m, int64_t n,
                             int64_t k, int64_t format, int64_t bits, int64_t threads) {
    blocks_job job = {.linear = {x, weights, bias, out, m, n, k, (int)threads}, .format = pb_block_format(format)};
    if (m * n * k < SMALL_WORK) job.linear.threads = 1;
    const int one_byte = bits == 8 && PB_ANY_BYTE_DOT && (CODE_BITS == 8 || !any_byte(job.format->codes));
    job.few = m <= FEW_ROWS * FEW_TILES || (FEW_ONLY && !one_byte);
    job.mode = one_byte ? ONE_BYTE : job.few ? FEW_MODE : PAIRS;
    job.rows = pb_block_rows(&job.linear, job.format, job.mode);
    pb_parallel(blocks_item, &job, ceil_div(m, ROW_BLOCK) * block_panels(n), job.linear.threads);
}
