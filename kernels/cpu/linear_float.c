/* Linear layers with fp32 or bf16 weights and fp32 arithmetic.
 *
 * Layout. Outputs are cut into panels of NR. fp32: [panel][K][NR]. bf16: [panel][K/2][NR] words of 32 bits
 * whose low half is the weight of an even k and whose high half is that of the next k, so that one shift or
 * one mask per vector turns them into floats.
 *
 * Order. Every output is one chain of fused multiply-adds over k = 0 .. K-1, from zero, then the bias. Tiles
 * of 1 to MR rows by one or a few panels only decide which chains run side by side, so a row's result depends
 * neither on the other rows, nor on the tile, nor on the thread.
 */
#include "linear_float.h"
#include "threads.h"

enum {
    ROW_BLOCK = 16 * MR,      /* rows whose inputs stay in the second-level cache while panels stream by */
    UNPACK_ROWS = 3 * MR,     /* from this many rows on, a bf16 panel is widened once instead of in every tile */
    PREFETCH = 4096,          /* bytes ahead in the stream of weights */
};

/* What a tile needs: x [rows][ldx], panels ``step`` bytes apart, out [rows][ldo] of which ``columns`` exist.
 * */
typedef struct {
    const float *x;
    const char *w;
    const float *bias;
    float *out;
    int64_t ldx, ldo, k, step, columns;
} tile_args;

enum { MOST_PANELS = 3 };
typedef vf tile_row[MOST_PANELS][NV];

/* The weights of one k: of fp32 panels row ``half`` of a pair of rows, of bf16 panels that half of each word.
 * */
INLINE void load_weights(tile_row b, const char *w, int64_t step, int panels, int bf16, int half) {
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            const char *at = w + p * step + (bf16 ? v : half * NV + v) * W * 4;
            if (!bf16) b[p][v] = vload((const float *)at);
            else if (half) b[p][v] = as_vf(viload(at) & ((vi){} + (int32_t)0xffff0000));
            else b[p][v] = as_vf(viload(at) << 16);
            if (!(bf16 && half) && (W == 16 || v % 2 == 0)) __builtin_prefetch(at + PREFETCH);
        }
}

INLINE void accumulate(tile_row *acc, const float *x, int64_t ldx, tile_row b, int rows, int panels) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vf a = vset1(x[r * ldx]);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][p][v] = vfma(a, b[p][v], acc[r][p][v]);
    }
}

INLINE void tile(const tile_args *t, int rows, int panels, int bf16) {
    tile_row acc[MR], b;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][p][v] = (vf){};
    const float *x = t->x, *end = x + (t->k & ~(int64_t)1);
    const char *w = t->w;
    const int64_t ldx = t->ldx, step = t->step;
    for (; x < end; x += 2, w += NR * (bf16 ? 4 : 8)) {
        load_weights(b, w, step, panels, bf16, 0);
        accumulate(acc, x, ldx, b, rows, panels);
        load_weights(b, w, step, panels, bf16, 1);
        accumulate(acc, x + 1, ldx, b, rows, panels);
    }
    if (t->k & 1) {
        load_weights(b, w, step, panels, bf16, 0);
        accumulate(acc, x, ldx, b, rows, panels);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            store_row(t->out + r * t->ldo + p * NR, acc[r][p], t->bias ? t->bias + p * NR : NULL, t->columns - p * NR);
}

/* One function per tile shape, so that accumulators are registers. One or two rows take several panels at a
 * time: a chain waits for its last step, and only other chains fill the wait. */
#define TILE(kind, bf16, rows, panels) \
    static void kind##_##rows##x##panels(const tile_args *t) { tile(t, rows, panels, bf16); }
#if MR == 8
#define EACH_TILE(X) X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(5, 1) X(6, 1) X(7, 1) X(8, 1) X(1, 3) X(2, 2)
#elif MR == 6
#define EACH_TILE(X) X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(5, 1) X(6, 1) X(1, 3) X(2, 2)
#else
#define EACH_TILE(X) X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(1, 3) X(2, 2)
#endif
#define FLOAT32_TILE(rows, panels) TILE(float32, 0, rows, panels)
#define BFLOAT16_TILE(rows, panels) TILE(bfloat16, 1, rows, panels)
EACH_TILE(FLOAT32_TILE)
EACH_TILE(BFLOAT16_TILE)

typedef void (*tile_function)(const tile_args *);
#define FLOAT32_ENTRY(rows, panels) float32_##rows##x##panels,
#define BFLOAT16_ENTRY(rows, panels) bfloat16_##rows##x##panels,
static const tile_function tiles[2][MR + 2] = {{EACH_TILE(FLOAT32_ENTRY)}, {EACH_TILE(BFLOAT16_ENTRY)}};

INLINE int panels_per_item(int64_t rows) { return rows == 1 ? 3 : rows == 2 ? 2 : 1; }

INLINE tile_function choose_tile(int bf16, int64_t rows, int64_t panels) {
    if (panels > 1) return tiles[bf16][rows == 1 ? MR : MR + 1];
    return tiles[bf16][rows - 1];
}

static void widen_panel(float *out, const char *w, int64_t k) {
    for (int64_t i = 0; i < k; i++)
        for (int v = 0; v < NV; v++) {
            vi pair = viload(w + ((i / 2) * NV + v) * W * 4);
            vstore(out + i * NR + v * W, as_vf(i & 1 ? pair & ((vi){} + (int32_t)0xffff0000) : pair << 16));
        }
}

/* Item: a block of rows by a few panels; all panels of the first row block come first. */
static void run_item(const linear_job *job, int64_t item, int bf16) {
    int64_t panels = panels_of(job->n), group = panels_per_item(job->m), groups = ceil_div(panels, group);
    int64_t first_row = item / groups * ROW_BLOCK, panel = item % groups * group;
    int64_t rows = job->m - first_row < ROW_BLOCK ? job->m - first_row : ROW_BLOCK;
    int64_t end = panel + group < panels ? panel + group : panels, step = panel_bytes(job->k, bf16);
    int64_t together = end - panel == group ? group : 1, tiles_count = ceil_div(rows, MR);
    for (; panel < end; panel += together) {
        const char *w = (const char *)job->weights + panel * step;
        int kind = bf16;
        if (bf16 && rows >= UNPACK_ROWS) {
            float *wide = pb_thread_memory(ITEM_MEMORY, 4 * job->k * NR);
            widen_panel(wide, w, job->k);
            w = (const char *)wide;
            kind = 0;
        }
        for (int64_t i = 0; i < tiles_count; i++) { /* tiles of nearly equal height */
            int64_t from = first_row + rows * i / tiles_count, to = first_row + rows * (i + 1) / tiles_count;
            tile_args t = {
                .x = job->x + from * job->k, .w = w, .bias = job->bias ? job->bias + panel * NR : NULL,
                .out = job->out + from * job->n + panel * NR, .ldx = job->k, .ldo = job->n, .k = job->k,
                .step = step, .columns = job->n - panel * NR,
            };
            choose_tile(kind, to - from, together)(&t);
        }
    }
}

static void float32_item(const void *job, int64_t item) { run_item(job, item, 0); }
static void bfloat16_item(const void *job, int64_t item) { run_item(job, item, 1); }

void pb_linear_float(const linear_job *job, int bf16) {
    int64_t items = ceil_div(job->m, ROW_BLOCK) * ceil_div(panels_of(job->n), panels_per_item(job->m));
    pb_parallel(bf16 ? bfloat16_item : float32_item, job, items, job->threads);
}
