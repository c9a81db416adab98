/* Linear layers with bf16 weights and bf16 activations, where vector units multiply pairs of both (vdpbf16ps).
 *
 * Activations are rounded to nearest even; products are exact, and added in fp32 by the instruction: for every pair of
 * k, in ascending order, the odd one, then the even one. So every output is one chain from zero, then the bias, and a
 * row's result depends neither on the other rows, nor on the tile, nor on the thread. The panels are those of
 * linear_float.c, whose words of two k are what the instruction takes.
 */
#include "linear_float.h"

#if PB_BF16_DOT
#include "threads.h"

enum {
    ROW_BLOCK = 32 * MR, /* rows whose activations stay in the second-level cache while panels stream by */
    PREFETCH = 4096,     /* bytes ahead in the stream of weights */
    MOST_PANELS = 3,
};

typedef struct {
    linear_job linear;
    const uint32_t *pairs; /* activations: [row][words] of two k */
    int64_t words;
} bf16_job;

/* words, w: of the tile's first row and panel; panels are ``step`` bytes apart; the first output is [0, 0] of out. */
typedef struct {
    const uint32_t *pairs;
    const char *w;
    const float *bias;
    float *out;
    int64_t words, step, ldo, columns;
} tile_args;

static void round_row(const void *context, int64_t row) {
    const bf16_job *job = context;
    const int64_t k = job->linear.k;
    const float *x = job->linear.x + row * k;
    uint16_t *out = (uint16_t *)(job->pairs + row * job->words);
    for (int64_t i = 0; i < k; i += W) {
        int n = k - i < W ? (int)(k - i) : W;
        __m256bh rounded = _mm512_cvtneps_pbh((__m512)vload_n(x + i, n));
        memcpy(out + i, &rounded, 2 * (size_t)n);
    }
    if (k & 1) out[k] = 0;
}

INLINE vf broadcast_pair(const uint32_t *pair) { return (vf)_mm512_set1_epi32((int32_t)*pair); }

INLINE vf dot_pairs(vf acc, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}

INLINE void tile(const tile_args *t, int rows, int panels) {
    vf acc[MR][MOST_PANELS][NV], b[MOST_PANELS][NV];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][p][v] = (vf){};
    const char *w = t->w;
    const int64_t words = t->words, step = t->step;
    for (const uint32_t *pair = t->pairs, *end = pair + words; pair < end; pair++, w += NR * 4) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                const char *at = w + p * step + v * W * 4;
                b[p][v] = vload((const float *)at);
                __builtin_prefetch(at + PREFETCH);
            }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vf a = broadcast_pair(pair + r * words);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) acc[r][p][v] = dot_pairs(acc[r][p][v], a, b[p][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            store_row(t->out + r * t->ldo + p * NR, acc[r][p], t->bias ? t->bias + p * NR : NULL, t->columns - p * NR);
}

/* One function per tile shape, so that accumulators are registers; a few rows take several panels, whose chains fill
 * each other's waits. */
#define EACH_TILE(X) X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(5, 1) X(6, 1) X(7, 1) X(8, 1) X(1, 3) X(2, 2)
#define TILE(rows, panels) \
    static void tile_##rows##x##panels(const tile_args *t) { tile(t, rows, panels); }
EACH_TILE(TILE)
#define ENTRY(rows, panels) tile_##rows##x##panels,
static void (*const tiles[MR + 2])(const tile_args *) = {EACH_TILE(ENTRY)};
_Static_assert(MR == 8, "tiles of several panels follow those of one");

INLINE int panels_per_item(int64_t rows) { return rows == 1 ? 3 : rows == 2 ? 2 : 1; }

/* Item: a block of rows by a few panels; all panels of the first row block come first. */
static void run_item(const void *context, int64_t item) {
    const bf16_job *bf16 = context;
    const linear_job *job = &bf16->linear;
    int64_t panels = panels_of(job->n), group = panels_per_item(job->m), groups = ceil_div(panels, group);
    int64_t first_row = item / groups * ROW_BLOCK, panel = item % groups * group;
    int64_t rows = job->m - first_row < ROW_BLOCK ? job->m - first_row : ROW_BLOCK;
    int64_t end = panel + group < panels ? panel + group : panels, step = panel_bytes(job->k, 1);
    int64_t together = end - panel == group ? group : 1, count = ceil_div(rows, MR);
    for (; panel < end; panel += together)
        for (int64_t i = 0; i < count; i++) { /* tiles of nearly equal height */
            int64_t from = first_row + rows * i / count, height = first_row + rows * (i + 1) / count - from;
            tile_args t = {
                .pairs = bf16->pairs + from * bf16->words, .w = (const char *)job->weights + panel * step,
                .bias = job->bias ? job->bias + panel * NR : NULL, .out = job->out + from * job->n + panel * NR,
                .words = bf16->words, .step = step, .ldo = job->n, .columns = job->n - panel * NR,
            };
            tiles[together > 1 ? MR + height - 1 : height - 1](&t);
        }
}

void pb_linear_bf16(const linear_job *linear) {
    bf16_job job = {*linear, NULL, ceil_div(linear->k, 2)};
    job.pairs = pb_thread_memory(CALLER_MEMORY, linear->m * job.words * 4);
    pb_parallel(round_row, &job, linear->m, linear->m * linear->k < 1 << 15 ? 1 : linear->threads);
    int64_t items = ceil_div(linear->m, ROW_BLOCK) * ceil_div(panels_of(linear->n), panels_per_item(linear->m));
    pb_parallel(run_item, &job, items, linear->threads);
}
#endif
