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
 * A cache of bf16 or of int8 codes is widened, which is exact: in registers for few rows, else once per key tile for
 * all rows. The scales of codes, one per token for keys and one for values, multiply scores and weights.
 *
 * Memory behind the last token of a sequence may hold anything: scores there are replaced, V there is not
 * read.
 */
#include "attention_tile.h"
#include "softmax.h"
#include "threads.h"

#include <stdlib.h>

enum {
    QUERIES = 16,  /* queries of a work item */
    SEGMENT = 512, /* tokens of a segment, a multiple of KEYS */
};

typedef struct {
    const float *q, *sinks;
    const char *key_cache, *value_cache;
    const uint16_t *key_scale, *value_scale; /* bf16 [block][kv head][block_size], of caches of int8 codes */
    float *out;
    const int32_t *query_start_loc, *seq_lens, *block_table, *tiles;
    int64_t table_width, q_stride, heads, kv_heads, d, block_size, window;
    float scale, softcap; /* scale: of q, with log2(e) in it unless scores are capped first */
    int size;             /* bytes of an element of the cache: 4 float, 2 bf16, 1 int8 */
    int64_t segments; /* 0: an item does all segments of its context; else the number that items are split into */
    float *partial;   /* [tile][kv head][row][segment][d + 2] then: output, maximum, sum */
} attention_job;

/* Working memory of a thread: one item's rows. */
typedef struct {
    softmax_rows soft;
    float k_scale[KEYS], v_scale[KEYS];
    float next[ROWS], sum[ROWS], total_maximum[ROWS], total_sum[ROWS];
    int32_t width[ROWS], position[ROWS]; /* tokens of the key tile that are scored; position in the sequence */
    float *q, *out, *total;              /* [ROWS][d] each */
    float *k, *v;                        /* [SUBS][d][SUB], [KEYS][d]: a key tile that is copied together */
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

/* Rows of the scratch: query and head of row r follow from ``row + r``. */
typedef struct {
    const int32_t *table;
    int64_t g, group, row, low; /* low: first token that any row sees */
    int rows;
} row_range;

/* First token slot of the head in the block that holds token ``position``. */
INLINE int64_t head_start(const attention_job *job, const row_range *range, int64_t position) {
    return (range->table[position / job->block_size] * job->kv_heads + range->g) * job->block_size;
}

/* First element of K or V there. */
INLINE int64_t block_start(const attention_job *job, const row_range *range, int64_t position) {
    return head_start(job, range, position) * job->d;
}

/* Scales of the key tile that begins at token ``start``, by token; those of the next one are fetched. */
static void load_scales(const attention_job *job, scratch *s, const row_range *range, int64_t start, int64_t end) {
    int64_t step = job->block_size < SUB ? 1 : SUB;
    for (int64_t i = 0; i < KEYS && start + i < end; i += step) {
        int64_t position = start + i, offset = position % job->block_size, later = position + KEYS;
        int64_t slot = head_start(job, range, position) + offset;
        if (step == 1) {
            s->k_scale[i] = bf16_to_float(job->key_scale[slot]), s->v_scale[i] = bf16_to_float(job->value_scale[slot]);
            continue;
        }
        for (int x = 0; x < SUB; x += W) {
            vstore(s->k_scale + i + x, vload_bf16(job->key_scale + slot + x));
            vstore(s->v_scale + i + x, vload_bf16(job->value_scale + slot + x));
        }
        if (later >= end) continue;
        int64_t next = head_start(job, range, later) + later % job->block_size;
        __builtin_prefetch(job->key_scale + next), __builtin_prefetch(job->value_scale + next);
    }
}

/* Point at the sub-blocks of the key tile that begins at token ``start``, and at those of the next one. */
static void locate_tile(const attention_job *job, const row_range *range, int64_t start, int64_t end, key_tile *t) {
    int64_t size = t->size;
    for (int i = 0; i < SUBS && start + i * SUB < end; i++) {
        int64_t position = start + i * SUB, offset = position % job->block_size;
        int64_t block = block_start(job, range, position), later = position + KEYS;
        t->k[i] = job->key_cache + (block + offset) * size;
        t->v[i] = job->value_cache + (block + offset * job->d) * size;
        if (later < end)
            t->ahead[i] = job->key_cache + (block_start(job, range, later) + later % job->block_size) * size;
    }
}

INLINE void use_copy(scratch *s, key_tile *t, int64_t d) {
    for (int i = 0; i < SUBS; i++) t->k[i] = (char *)(s->k + i * SUB * d), t->v[i] = (char *)(s->v + i * SUB * d);
    t->k_stride = SUB;
    t->size = sizeof(float), t->fetch = 0;
}

INLINE float element(const char *cache, int64_t at, int size) {
    if (size == 1) return ((const int8_t *)cache)[at];
    return size == 2 ? bf16_to_float(((const uint16_t *)cache)[at]) : ((const float *)cache)[at];
}

/* The same for blocks shorter than a sub-block: copy tokens [start, end) together. */
static void gather_tile(const attention_job *job, scratch *s, const row_range *range, int64_t start, int64_t end,
                        key_tile *t) {
    int64_t size = job->block_size, d = job->d;
    for (int64_t j = start; j < end; j++) {
        int64_t from = block_start(job, range, j) + j % size, from_v = from + j % size * (d - 1);
        float *k = s->k + (j - start) / SUB * SUB * d + (j - start) % SUB, *v = s->v + (j - start) * d;
        for (int64_t i = 0; i < d; i++) {
            k[i * SUB] = element(job->key_cache, from + i * size, t->size);
            v[i] = element(job->value_cache, from_v + i, t->size);
        }
    }
    use_copy(s, t, d);
}

/* Widen ``subs`` sub-blocks for rows that take several passes over them. */
INLINE void widen(scratch *s, key_tile *t, int64_t d, int subs, int size) {
    for (int i = 0; i < subs; i++) {
        for (int64_t j = 0; j < d; j++) {
            float *to = s->k + (i * d + j) * SUB, *to_v = s->v + (i * d + j) * SUB;
            for (int x = 0; x < SUB; x += W) {
                vstore(to + x, load_kv(t->k[i], j * t->k_stride + x, W, size));
                vstore(to_v + x, load_kv(t->v[i], j * SUB + x, W, size));
            }
            if (t->ahead[i]) __builtin_prefetch(t->ahead[i] + j * SUB * size);
        }
    }
    use_copy(s, t, d);
}

static void widen_tile(scratch *s, key_tile *t, int64_t d, int subs) {
    if (t->size == 1) widen(s, t, d, subs, 1);
    else widen(s, t, d, subs, 2);
}

/* Tokens [first, last) of the key tile at ``start`` that rows ``from`` .. ``to - 1`` see; none: last = 0. */
INLINE void view(const attention_job *job, const scratch *s, int64_t start, int64_t end, int from, int to, int *first,
                 int *last) {
    int64_t low = job->window ? s->position[from] - job->window + 1 - start : 0;
    int64_t high = (s->position[to - 1] + 1 < end ? s->position[to - 1] + 1 : end) - start;
    *first = low > 0 ? (int)(low < KEYS ? low : KEYS) : 0;
    *last = high < KEYS ? (int)high : KEYS;
    if (*last <= *first) *first = *last = 0;
}

/* Attention of the rows over the keys [begin, end) of one segment: output, maximum and sum in the scratch. */
static void segment_rows(const attention_job *job, scratch *s, const row_range *range, int64_t begin, int64_t end) {
    int64_t d = job->d;
    int rows = range->rows, tiles = (int)ceil_div(rows, TILE_ROWS), first, last;
    softmax_rows *soft = &s->soft;
    softmax_start(soft, rows);
    memset(s->out, 0, 4 * (size_t)(rows * d));
    for (int64_t start = (begin > range->low ? begin : range->low) / KEYS * KEYS; start < end; start += KEYS) {
        key_tile t = {.k_stride = job->block_size, .size = job->size, .fetch = 1};
        int64_t count = end - start < KEYS ? end - start : KEYS;
        if (job->block_size < SUB) gather_tile(job, s, range, start, start + count, &t);
        else locate_tile(job, range, start, end, &t);
        if (job->key_scale) load_scales(job, s, range, start, end), t.k_scale = s->k_scale;
        if (t.size < 4 && tiles > 1) widen_tile(s, &t, d, (int)ceil_div(count, SUB));
        int fetch = t.fetch;
        for (int i = 0; i < tiles; i++) {
            int from = rows * i / tiles, to = rows * (i + 1) / tiles;
            view(job, s, start, end, from, to, &t.first, &t.last);
            t.subs = (int)ceil_div(t.last, SUB);
            if (t.subs) score_tile(s->q + from * d, soft->score + from, &t, d, to - from), t.fetch = 0;
            for (int r = from; r < to; r++) {
                view(job, s, start, end, r, r + 1, &first, &last);
                s->width[r] = t.subs * SUB;
                float top = visible_maximum(soft->score[r], first, last, s->width[r], job->softcap);
                s->next[r] = top > soft->maximum[r] ? top : soft->maximum[r];
            }
        }
        softmax_weights(soft, s->next, s->width, rows);
        for (int r = 0; r < (job->value_scale ? rows : 0); r++)
            for (int i = 0; i < s->width[r]; i += W)
                vstore(soft->score[r] + i, vload(soft->score[r] + i) * vload(s->v_scale + i));
        t.fetch = fetch;
        for (int i = 0; i < tiles; i++) {
            int from = rows * i / tiles, to = rows * (i + 1) / tiles;
            view(job, s, start, end, from, to, &t.first, &t.last);
            if (!t.last) continue;
            value_tile(s->out + from * d, soft->score + from, soft->rescale + from, &t, d, to - from);
            t.fetch = 0;
        }
    }
    for (int r = 0; r < rows; r++) s->sum[r] = vsum(vload(soft->sum[r]));
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
                           .rows = (int)(all_rows - row < ROWS ? all_rows - row : ROWS)};
        for (int r = 0; r < range.rows; r++) {
            int64_t query = (row + r) / group, head = g * group + (row + r) % group;
            const float *q = job->q + (token + query) * job->q_stride + head * d;
            for (int64_t i = 0; i < d; i++) s->q[r * d + i] = q[i] * job->scale;
            s->position[r] = (int32_t)(position + query);
            s->total_maximum[r] = -INFINITY, s->total_sum[r] = 0.0f;
        }
        int64_t first = s->position[0], end = s->position[range.rows - 1] + 1;
        range.low = job->window && first >= job->window ? first - job->window + 1 : 0;
        int64_t from = range.low / SEGMENT, to = ceil_div(end, SEGMENT);
        if (only >= 0) from = from > only ? from : only, to = to < only + 1 ? to : only + 1;
        memset(s->total, 0, 4 * (size_t)(range.rows * d));
        for (int64_t i = from; i < to; i++) {
            segment_rows(job, s, &range, i * SEGMENT, end < (i + 1) * SEGMENT ? end : (i + 1) * SEGMENT);
            for (int r = 0; r < range.rows; r++)
                softmax_merge(s->total + r * d, &s->total_maximum[r], &s->total_sum[r], s->out + r * d,
                              s->soft.maximum[r], s->sum[r], d);
        }
        for (int r = 0; r < range.rows; r++) {
            if (only < 0) {
                int64_t query = (row + r) / group, head = g * group + (row + r) % group;
                softmax_finish(job->out + ((token + query) * job->heads + head) * d, s->total + r * d,
                               s->total_maximum[r], s->total_sum[r], job->sinks ? job->sinks + head : NULL, d);
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
            softmax_merge(s->total, &maximum, &sum, partial, partial[d], partial[d + 1], d);
        }
        int64_t head = g * group + row % group;
        softmax_finish(job->out + ((token + row / group) * job->heads + head) * d, s->total, maximum, sum,
                       job->sinks ? job->sinks + head : NULL, d);
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

/* key_cache, value_cache: of elements of ``size`` bytes, 4 float, 2 bf16, 1 int8 codes with a scale in bf16 per token and
 * head; the scales are NULL for the others. */
EXPORT void pb_attention(const float *q, const void *key_cache, const void *value_cache, const uint16_t *key_scale,
                         const uint16_t *value_scale, const float *sinks,
                         float *out, const int32_t *query_start_loc, const int32_t *seq_lens,
                         const int32_t *block_table, const int32_t *tiles, int64_t tile_count, int64_t longest,
                         int64_t table_width, int64_t q_stride, int64_t heads, int64_t kv_heads, int64_t d,
                         int64_t block_size, int64_t window, double scale, double softcap, int64_t threads,
                         int64_t size) {
    attention_job job = {.q = q, .sinks = sinks, .key_cache = key_cache, .value_cache = value_cache,
                         .key_scale = key_scale, .value_scale = value_scale, .out = out,
                         .query_start_loc = query_start_loc, .seq_lens = seq_lens, .block_table = block_table,
                         .tiles = tiles, .table_width = table_width, .q_stride = q_stride, .heads = heads,
                         .kv_heads = kv_heads, .d = d, .block_size = block_size, .window = window,
                         .scale = (float)(softcap > 0.0 ? scale : scale * 1.4426950408889634),
                         .softcap = (float)softcap, .size = (int)size};
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
