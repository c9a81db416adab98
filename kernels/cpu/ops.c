/* The small fused operations between the products: norms, rotary + KV write, activations, soft caps, block copies.
 *
 * All are bound by memory; each reads its inputs once. Rows are independent, and each is computed by one
 * thread.
 */
#include "panels.h"
#include "threads.h"

enum { FLOATS_PER_ITEM = 8192 }; /* about two microseconds of work */

/* Rows that make one item, and the number of items. */
INLINE int64_t rows_per_item(int64_t row_floats) {
    return row_floats >= FLOATS_PER_ITEM ? 1 : FLOATS_PER_ITEM / row_floats;
}

typedef struct {
    const float *x, *weight;
    float *residual, *out; /* residual: NULL, or [rows][d], increased by x first */
    int64_t rows, d;
    float eps;
} norm_job;

static void norm_item(const void *context, int64_t item) {
    const norm_job *job = context;
    int64_t d = job->d, step = rows_per_item(d), end = (item + 1) * step;
    if (end > job->rows) end = job->rows;
    for (int64_t row = item * step; row < end; row++) {
        const float *x = job->x + row * d;
        float *residual = job->residual ? job->residual + row * d : NULL, *out = job->out + row * d;
        vf square[4] = {};
        for (int64_t i = 0, v = 0; i < d; i += W, v++) {
            int n = d - i < W ? (int)(d - i) : W;
            vf value = vload_n(x + i, n);
            if (residual) {
                value += vload_n(residual + i, n);
                vstore_n(residual + i, value, n);
            }
            square[v % 4] = vfma(value, value, square[v % 4]);
        }
        if (residual) x = residual;
        float mean = vsum((square[0] + square[1]) + (square[2] + square[3])) / (float)d;
        vf scale = vset1(1.0f / __builtin_sqrtf(mean + job->eps));
        int64_t i = 0;
        for (; i + W <= d; i += W) vstore(out + i, vload(x + i) * scale * vload(job->weight + i));
        if (i < d) {
            int n = (int)(d - i);
            vstore_n(out + i, vload_n(x + i, n) * scale * vload_n(job->weight + i, n), n);
        }
    }
}

/* out = x / rms(x) * weight, rows of d; with a residual, of residual + x, which is stored there. */
EXPORT void pb_rms_norm(const float *x, float *residual, const float *weight, float *out, int64_t rows, int64_t d,
                        double eps, int64_t threads) {
    norm_job job = {x, weight, residual, out, rows, d, (float)eps};
    pb_parallel(norm_item, &job, ceil_div(rows, rows_per_item(d)), rows * d < 4 * FLOATS_PER_ITEM ? 1 : (int)threads);
}

enum { SILU = 0, GELU = 1, GELU_TANH = 2 };

typedef struct {
    const float *x;
    float *out;
    int64_t rows, d;
    int activation;
} act_job;

INLINE vf activate(vf x, int activation) {
    if (activation == SILU) return x / (1.0f + vexp(-x));
    if (activation == GELU) return 0.5f * x * (1.0f + verf(x * 0.70710678f));
    return 0.5f * x * (1.0f + vtanh(0.79788456f * vfma(x * x * 0.044715f, x, x)));
}

INLINE void act_rows(const act_job *job, int64_t item, int activation) {
    int64_t d = job->d, step = rows_per_item(d), end = (item + 1) * step;
    if (end > job->rows) end = job->rows;
    for (int64_t row = item * step; row < end; row++) {
        const float *gate = job->x + row * 2 * d, *up = gate + d;
        float *out = job->out + row * d;
        int64_t i = 0;
        for (; i + W <= d; i += W) vstore(out + i, activate(vload(gate + i), activation) * vload(up + i));
        if (i < d) {
            int n = (int)(d - i);
            vstore_n(out + i, activate(vload_n(gate + i, n), activation) * vload_n(up + i, n), n);
        }
    }
}

static void act_item(const void *context, int64_t item) {
    const act_job *job = context;
    if (job->activation == SILU) act_rows(job, item, SILU);
    else if (job->activation == GELU) act_rows(job, item, GELU);
    else act_rows(job, item, GELU_TANH);
}

/* x [rows][2 d] -> out [rows][d] = act(first half) * second half. */
EXPORT void pb_act_and_mul(const float *x, float *out, int64_t rows, int64_t d, int64_t activation, int64_t threads) {
    act_job job = {x, out, rows, d, (int)activation};
    pb_parallel(act_item, &job, ceil_div(rows, rows_per_item(d)), rows * d < 2 * FLOATS_PER_ITEM ? 1 : (int)threads);
}

/* Softcaps of whole arrays, in pieces that each one thread computes. */
typedef struct {
    float *x;
    int64_t count;
    float cap;
} softcap_job;

static void softcap_item(const void *context, int64_t item) {
    const softcap_job *job = context;
    int64_t i = item * FLOATS_PER_ITEM, end = i + FLOATS_PER_ITEM;
    if (end > job->count) end = job->count;
    for (; i < end; i += W) {
        int n = end - i < W ? (int)(end - i) : W;
        vstore_n(job->x + i, vtanh(vload_n(job->x + i, n) / job->cap) * job->cap, n);
    }
}

/* x [count] = cap * tanh(x / cap), in place. */
EXPORT void pb_softcap(float *x, int64_t count, double cap, int64_t threads) {
    softcap_job job = {x, count, (float)cap};
    pb_parallel(softcap_item, &job, ceil_div(count, FLOATS_PER_ITEM), count < 2 * FLOATS_PER_ITEM ? 1 : (int)threads);
}

typedef struct {
    float *q, *k;
    const float *v, *cos, *sin;
    void *key_cache, *value_cache;     /* of float, of bf16 or of int8, by the size of an element */
    uint16_t *key_scale, *value_scale; /* bf16 [block][kv head][block_size], of int8 */
    const int64_t *slots;
    int64_t tokens, heads, kv_heads, d, half, block_size, q_stride, k_stride, v_stride, size;
} rotary_job;

/* Pairs (i, i + half) of one head, turned by the token's angles. */
INLINE void rotate(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += W) {
        int n = half - i < W ? (int)(half - i) : W;
        vf c = vload_n(cos + i, n), s = vload_n(sin + i, n), a = vload_n(x + i, n), b = vload_n(x + half + i, n);
        vstore_n(x + i, vfma(a, c, -(b * s)), n);
        vstore_n(x + half + i, vfma(b, c, a * s), n);
    }
}

/* x [d] as codes of 8 bits, ``stride`` apart; returns their scale, a bf16 number: a 127th of the largest element, rounded
 * up. The scale of numbers that are not all finite is NaN. */
INLINE uint16_t write_codes(int8_t *codes, int64_t stride, const float *x, int64_t d) {
    vi top = {}; /* bits of floats >= 0 are in the order of the floats, NaN above all */
    for (int64_t i = 0; i < d; i += W) {
        vi bits = as_vi(vabs(vload_n(x + i, d - i < W ? (int)(d - i) : W))), more = bits > top;
        top = (bits & more) | (top & ~more);
    }
    int32_t most = 0;
    for (int i = 0; i < W; i++) most = top[i] > most ? top[i] : most;
    float largest;
    memcpy(&largest, &most, 4);
    largest /= 127.0f;
    uint32_t bits;
    memcpy(&bits, &largest, 4);
    uint16_t scale = most < 0x7f800000 ? (uint16_t)((bits + 0xffff) >> 16) : 0x7fc0;
    const vf step = vset1(bf16_to_float(scale)), magic = vset1(12582912.0f); /* as in vexp */
    const vi usable = step > 0.0f;
    for (int64_t i = 0; i < d; i += W) {
        int n = d - i < W ? (int)(d - i) : W;
        vi code = (as_vi(vload_n(x + i, n) / step + magic) - as_vi(magic)) & usable;
        for (int j = 0; j < n; j++) codes[(i + j) * stride] = (int8_t)code[j];
    }
    return scale;
}

static void rotary_item(const void *context, int64_t t) {
    const rotary_job *job = context;
    int64_t d = job->d, size = job->block_size;
    const float *cos = job->cos + t * job->half, *sin = job->sin + t * job->half;
    for (int64_t h = 0; h < job->heads; h++) rotate(job->q + t * job->q_stride + h * d, cos, sin, job->half);
    int64_t block = job->slots[t] / size, offset = job->slots[t] % size;
    for (int64_t g = 0; g < job->kv_heads; g++) {
        float *key = job->k + t * job->k_stride + g * d;
        rotate(key, cos, sin, job->half);
        const float *value = job->v + t * job->v_stride + g * d;
        int64_t head = (block * job->kv_heads + g) * d * size, column = head + offset, row = head + offset * d;
        if (job->size == 1) {
            int64_t slot = (block * job->kv_heads + g) * size + offset;
            job->key_scale[slot] = write_codes((int8_t *)job->key_cache + column, size, key, d);
            job->value_scale[slot] = write_codes((int8_t *)job->value_cache + row, 1, value, d);
        } else if (job->size == 2) {
            uint16_t *keys = job->key_cache, *values = job->value_cache;
            for (int64_t i = 0; i < d; i++) keys[column + i * size] = float_to_bf16(key[i]);
            for (int64_t i = 0; i < d; i++) values[row + i] = float_to_bf16(value[i]);
        } else {
            float *keys = job->key_cache, *values = job->value_cache;
            for (int64_t i = 0; i < d; i++) keys[column + i * size] = key[i];
            memcpy(values + row, value, 4 * (size_t)d);
        }
    }
}

/* Rotate q [T][heads][d] and k [T][kv_heads][d] in place (strides are from token to token) and write k and v
 * to their slots: as they are if elements of the cache have a ``size`` of 4 bytes, rounded to bf16 if of 2, as codes and
 * scales if of 1. Returns -1, or, having done nothing, the index of a
 * slot outside of the cache's ``blocks``. */
EXPORT int64_t pb_rotary_and_cache(float *q, float *k, const float *v, const float *cos, const float *sin,
                                   void *key_cache, void *value_cache, uint16_t *key_scale,
                                   uint16_t *value_scale, const int64_t *slots, int64_t tokens, int64_t heads,
                                   int64_t kv_heads, int64_t d, int64_t half, int64_t block_size, int64_t blocks,
                                   int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t threads,
                                   int64_t size) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= blocks * block_size) return t;
    rotary_job job = {q, k, v, cos, sin, key_cache, value_cache, key_scale, value_scale, slots, tokens, heads,
                      kv_heads, d, half, block_size, q_stride, k_stride, v_stride, size};
    int64_t work = tokens * (heads + 4 * kv_heads) * d;
    pb_parallel(rotary_item, &job, tokens, work < 8 * FLOATS_PER_ITEM ? 1 : (int)threads);
    return -1;
}

/* Copy whole blocks of ``size`` bytes each; pairs are (source, destination). */
EXPORT void pb_copy_blocks(char *cache, const int64_t *pairs, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; i++)
        memcpy(cache + pairs[2 * i + 1] * size, cache + pairs[2 * i] * size, (size_t)size);
}
