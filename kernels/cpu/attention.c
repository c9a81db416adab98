/* Causal attention over the paged KV cache.
 *
 * Item: (query tile of a sequence, kv head). The heads of a GQA group are packed as rows, so that K and V are
 * read once for all of them: row = query * group + head. Keys are taken in tiles of KEYS tokens at absolute
 * positions (a multiple of KEYS), each as SUBS sub-blocks of 16 tokens, by an online softmax: scores, row
 * maximum, one rescale, weights, PV.
 *
 * Order. Every score is one chain over d and every output one chain over tokens; maxima, sums and rescales
 * are per row and per key tile. A key that a row does not see has weight exactly 0 and leaves its sums as
 * they are, and a key tile of which it sees nothing is skipped for it. So a query's result depends on its own
 * position only: not on the chunk it came in, nor on its neighbours in the tile. Contexts are cut into
 * segments of SEGMENT tokens whose partial results are merged in order, always, whether or not threads share
 * the segments of one item.
 *
 * Memory behind the last token of a sequence may hold anything: scores there are replaced, V there is not
 * read.
 */
#include "attention_tile.h"
#include "threads.h"

#include <math.h>
#include <stdlib.h>

enum {
    QUERIES = 16,  /* queries of a work item */
    ROWS = 48,     /* rows handled at once */
    SEGMENT = 512, /* tokens of a segment, a multiple of KEYS */
};

typedef struct {
    const float *q, *key_cache, *value_cache, *sinks;
    float *out;
    const int32_t *query_start_loc, *seq_lens, *block_table, *tiles;
    int64_t table_width, q_stride, heads, kv_heads, d, block_size, window;
    float scale, softcap;
    int64_t segments; /* 0: an item does all segments of its context; else the number that items are split into */
    float *partial;   /* [tile][kv head][row][segment][d + 2] then: output, maximum, sum */
} attention_job;

/* Working memory of a thread: one item's rows. */
typedef struct {
    float *q, *out, *total; /* [ROWS][d] each */
    float *k, *v;           /* [SUBS][d][SUB], [KEYS][d]: a key tile copied together from blocks of less than SUB tokens */
    float score[ROWS][KEYS];
    float maximum[ROWS], sum[ROWS], rescale[ROWS], total_maximum[ROWS], total_sum[ROWS];
} scratch;

static scratch *item_scratch(int64_t d) {
    int64_t head = ceil_div(sizeof(scratch), 64) * 64;
    scratch *s = pb_thread_memory(ITEM_MEMORY, head + 4 * (3 * ROWS + 2 * KEYS) * d);
    s->q = (float *)((char *)s + head);
    s->out = s->q + ROWS * d;
    s->total = s->out + ROWS * d;
    s->k = s->total + ROWS * d;
    s->v = s->k + KEYS * d;
    return s;
}

INLINE float exp_of(float x) { return vexp(vset1(x))[0]; }

/* Turn a row's scores into weights. It sees tokens [first, last) of the tile; [0, width) are written. */
static void softmax_row(scratch *s, int r, int first, int last, int width, float softcap) {
    float *row = s->score[r];
    s->rescale[r] = 1.0f;
    if (first >= last) {
        memset(row, 0, 4 * (size_t)width);
        return;
    }
    vf top = vset1(-INFINITY);
    for (int i = 0; i < width; i += W) {
        vi lane = vlanes() + i;
        vf x = vload(row + i);
        if (softcap > 0.0f) x = softcap * vtanh(x / softcap);
        x = vselect((lane >= first) & (lane < last), x, vset1(-INFINITY));
        vstore(row + i, x);
        top = vmax(top, x);
    }
    float before = s->maximum[r], maximum = vmaximum(top);
    if (before > maximum) maximum = before;
    vf sum = {};
    for (int i = 0; i < width; i += W) {
        vf x = vexp(vload(row + i) - maximum);
        vstore(row + i, x);
        sum += x;
    }
    float rescale = before == maximum ? 1.0f : exp_of(before - maximum);
    s->rescale[r] = rescale;
    s->maximum[r] = maximum;
    s->sum[r] = s->sum[r] * rescale + vsum(sum);
}

/* (out, maximum, sum) += (part, part_maximum, part_sum): two softmax parts become one. */
static void merge(float *out, float *maximum, float *sum, const float *part, float part_maximum, float part_sum,
                  int64_t d) {
    if (part_sum == 0.0f) return; /* a segment of which the row sees nothing */
    float top = *maximum > part_maximum ? *maximum : part_maximum;
    float mine = exp_of(*maximum - top), theirs = exp_of(part_maximum - top);
    for (int64_t i = 0; i < d; i += W) {
        int n = d - i < W ? (int)(d - i) : W;
        vstore_n(out + i, vfma(vload_n(part + i, n), vset1(theirs), vload_n(out + i, n) * mine), n);
    }
    *sum = vfma(vset1(part_sum), vset1(theirs), vset1(*sum * mine))[0];
    *maximum = top;
}

/* Divide by the sum, with the sink's share if there is one, and store the row. */
static void finish_row(const attention_job *job, float *out, const float *row, float maximum, float sum, int64_t head) {
    float scale = 1.0f;
    if (job->sinks) {
        float sink = job->sinks[head], top = maximum > sink ? maximum : sink;
        scale = exp_of(maximum - top);
        sum = sum * scale + exp_of(sink - top);
    }
    scale /= sum;
    for (int64_t i = 0; i < job->d; i++) out[i] = row[i] * scale;
}

/* K and V of the sub-block that holds token ``position`` (a multiple of SUB). */
INLINE void locate(const attention_job *job, const int32_t *table, int64_t position, int64_t g, const float **k,
                   const float **v) {
    int64_t block = table[position / job->block_size], offset = position % job->block_size;
    int64_t base = (block * job->kv_heads + g) * job->d * job->block_size;
    *k = job->key_cache + base + offset;
    *v = job->value_cache + base + offset * job->d;
}

/* The same for blocks shorter than a sub-block: copy tokens [start, end) together. */
static void gather_tile(const attention_job *job, scratch *s, const int32_t *table, int64_t g, int64_t start,
                        int64_t end, key_tile *t) {
    int64_t size = job->block_size, d = job->d;
    for (int64_t j = start; j < end; j++) {
        int64_t base = ((int64_t)table[j / size] * job->kv_heads + g) * d * size;
        float *k = s->k + (j - start) / SUB * SUB * d + (j - start) % SUB;
        for (int64_t i = 0; i < d; i++) k[i * SUB] = job->key_cache[base + i * size + j % size];
        memcpy(s->v + (j - start) * d, job->value_cache + base + j % size * d, 4 * (size_t)d);
    }
    for (int i = 0; i < t->subs; i++) t->k[i] = s->k + i * SUB * d, t->v[i] = s->v + i * SUB * d;
    t->k_stride = SUB;
}

/* Rows of the scratch: query and head of row r follow from ``row + r``. */
typedef struct {
    const int32_t *table;
    int64_t g, group, row, position, low; /* position: of row 0 of the item; low: first token that any row sees */
    int rows;
} row_range;

/* Attention of the rows over the keys [begin, end) of one segment: output, maximum and sum in the scratch. */
static void segment_rows(const attention_job *job, scratch *s, const row_range *range, int64_t begin, int64_t end) {
    int64_t d = job->d;
    int rows = range->rows, tiles = (int)ceil_div(rows, TILE_ROWS);
    for (int r = 0; r < rows; r++) s->maximum[r] = -INFINITY, s->sum[r] = 0.0f;
    memset(s->out, 0, 4 * (size_t)(rows * d));
    for (int64_t start = (begin > range->low ? begin : range->low) / KEYS * KEYS; start < end; start += KEYS) {
        key_tile t = {.k_stride = job->block_size, .fetch = job->block_size >= SUB};
        t.last = (int)(end - start < KEYS ? end - start : KEYS);
        t.first = (int)(range->low > start ? range->low - start : 0);
        t.subs = (int)ceil_div(t.last, SUB);
        if (job->block_size < SUB) gather_tile(job, s, range->table, range->g, start, start + t.last, &t);
        else
            for (int i = 0; i < t.subs; i++) {
                int64_t position = start + i * SUB;
                const float *unused;
                locate(job, range->table, position, range->g, &t.k[i], &t.v[i]);
                if (position + KEYS < end) locate(job, range->table, position + KEYS, range->g, &t.ahead[i], &unused);
            }
        key_tile fetching = t;
        t.fetch = 0;
        for (int i = 0; i < tiles; i++) {
            int from = rows * i / tiles, to = rows * (i + 1) / tiles;
            score_tile(s->q + from * d, s->score + from, i ? &t : &fetching, d, to - from);
        }
        for (int r = 0; r < rows; r++) {
            int64_t position = range->position + (range->row + r) / range->group - start;
            int64_t first = job->window && position >= job->window ? position - job->window + 1 : 0;
            int64_t last = position + 1 < t.last ? position + 1 : t.last;
            softmax_row(s, r, first < KEYS ? (int)first : KEYS, (int)last, t.subs * SUB, job->softcap);
        }
        for (int i = 0; i < tiles; i++) {
            int from = rows * i / tiles, to = rows * (i + 1) / tiles;
            value_tile(s->out + from * d, s->score + from, s->rescale + from, i ? &t : &fetching, d, to - from);
        }
    }
}

/* Where the partial result of a row is: output, maximum, sum. */
INLINE float *partial_row(const attention_job *job, int64_t tile, int64_t g, int64_t row, int64_t segment) {
    int64_t rows = QUERIES * (job->heads / job->kv_heads);
    return job->partial + (((tile * job->kv_heads + g) * rows + row) * job->segments + segment) * (job->d + 2);
}

/* One work item; ``only`` is the segment to do, or -1 for all of them. */
static void attend(const attention_job *job, int64_t tile, int64_t g, int64_t only) {
    const int32_t *entry = job->tiles + 3 * tile; /* sequence, first query of the tile, queries */
    int64_t sequence = entry[0], d = job->d, group = job->heads / job->kv_heads, all_rows = entry[2] * group;
    int64_t start = job->query_start_loc[sequence], token = start + entry[1];
    int64_t new_tokens = job->query_start_loc[sequence + 1] - start;
    int64_t position = job->seq_lens[sequence] - new_tokens + entry[1];
    scratch *s = item_scratch(d);
    for (int64_t row = 0; row < all_rows; row += ROWS) {
        row_range range = {.table = job->block_table + sequence * job->table_width, .g = g, .group = group, .row = row,
                           .position = position, .rows = (int)(all_rows - row < ROWS ? all_rows - row : ROWS)};
        int64_t first = position + row / group, end = position + (row + range.rows - 1) / group + 1;
        range.low = job->window && first >= job->window ? first - job->window + 1 : 0;
        int64_t from = range.low / SEGMENT, to = ceil_div(end, SEGMENT);
        if (only >= 0) from = from > only ? from : only, to = to < only + 1 ? to : only + 1;
        for (int r = 0; r < range.rows; r++) {
            const float *q = job->q + (token + (row + r) / group) * job->q_stride + (g * group + (row + r) % group) * d;
            for (int64_t i = 0; i < d; i++) s->q[r * d + i] = q[i] * job->scale;
            s->total_maximum[r] = -INFINITY, s->total_sum[r] = 0.0f;
        }
        memset(s->total, 0, 4 * (size_t)(range.rows * d));
        for (int64_t i = from; i < to; i++) {
            segment_rows(job, s, &range, i * SEGMENT, end < (i + 1) * SEGMENT ? end : (i + 1) * SEGMENT);
            for (int r = 0; r < range.rows; r++)
                merge(s->total + r * d, &s->total_maximum[r], &s->total_sum[r], s->out + r * d, s->maximum[r],
                      s->sum[r], d);
        }
        for (int r = 0; r < range.rows; r++) {
            if (only < 0) {
                int64_t head = g * group + (row + r) % group;
                finish_row(job, job->out + ((token + (row + r) / group) * job->heads + head) * d, s->total + r * d,
                           s->total_maximum[r], s->total_sum[r], head);
                continue;
            }
            float *partial = partial_row(job, tile, g, row + r, only);
            memcpy(partial, s->total + r * d, 4 * (size_t)d);
            partial[d] = s->total_maximum[r], partial[d + 1] = s->total_sum[r];
        }
    }
}

static void whole_item(const void *context, int64_t item) {
    const attention_job *job = context;
    attend(job, item / job->kv_heads, item % job->kv_heads, -1);
}

static void split_item(const void *context, int64_t item) {
    const attention_job *job = context;
    int64_t pair = item / job->segments;
    attend(job, pair / job->kv_heads, pair % job->kv_heads, item % job->segments);
}

/* Merge the segments of a split item in order. */
static void merge_item(const void *context, int64_t item) {
    const attention_job *job = context;
    int64_t tile = item / job->kv_heads, g = item % job->kv_heads, d = job->d, group = job->heads / job->kv_heads;
    const int32_t *entry = job->tiles + 3 * tile;
    int64_t token = job->query_start_loc[entry[0]] + entry[1];
    scratch *s = item_scratch(d);
    for (int64_t row = 0; row < entry[2] * group; row++) {
        float maximum = -INFINITY, sum = 0.0f;
        memset(s->total, 0, 4 * (size_t)d);
        for (int64_t i = 0; i < job->segments; i++) {
            const float *partial = partial_row(job, tile, g, row, i);
            merge(s->total, &maximum, &sum, partial, partial[d], partial[d + 1], d);
        }
        int64_t head = g * group + row % group;
        finish_row(job, job->out + ((token + row / group) * job->heads + head) * d, s->total, maximum, sum, head);
    }
}

/* Query tiles of a batch: (sequence, first query, queries) each. ``tiles`` may be NULL to count them. */
EXPORT int64_t pb_plan_attention(const int32_t *query_start_loc, int64_t sequences, int32_t *tiles) {
    int64_t count = 0;
    for (int64_t s = 0; s < sequences; s++) {
        int32_t queries = query_start_loc[s + 1] - query_start_loc[s];
        for (int32_t q = 0; q < queries; q += QUERIES, count++)
            if (tiles) {
                tiles[3 * count] = (int32_t)s;
                tiles[3 * count + 1] = q;
                tiles[3 * count + 2] = queries - q < QUERIES ? queries - q : QUERIES;
            }
    }
    return count;
}

EXPORT void pb_attention(const float *q, const float *key_cache, const float *value_cache, const float *sinks,
                            float *out, const int32_t *query_start_loc, const int32_t *seq_lens,
                            const int32_t *block_table, const int32_t *tiles, int64_t tile_count, int64_t longest,
                            int64_t table_width, int64_t q_stride, int64_t heads, int64_t kv_heads, int64_t d,
                            int64_t block_size, int64_t window, double scale, double softcap, int64_t threads) {
    attention_job job = {q, key_cache, value_cache, sinks, out, query_start_loc, seq_lens, block_table, tiles,
                         table_width, q_stride, heads, kv_heads, d, block_size, window, (float)scale, (float)softcap,
                         0, NULL};
    int64_t items = tile_count * kv_heads;
    if (threads > 1 && items < 4 * threads && longest > SEGMENT) {
        job.segments = ceil_div(longest, SEGMENT);
        int64_t rows = items * QUERIES * (heads / kv_heads);
        job.partial = malloc(4 * (size_t)(rows * job.segments * (d + 2)));
    }
    if (!job.partial) {
        pb_parallel(whole_item, &job, items, (int)threads);
        return;
    }
    pb_parallel(split_item, &job, items * job.segments, (int)threads);
    pb_parallel(merge_item, &job, items, (int)threads);
    free(job.partial);
}
