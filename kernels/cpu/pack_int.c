/* Quantising and packing int8 and int4 weights, the outputs of a panel side by side in the lanes of vectors. */
#include "linear_int.h"
#include "threads.h"

enum { PACK_CHOICES = 6 };

typedef struct {
    char *packed;
    const char *source;
    int64_t n, first, rows, k, ld;
    int from_bf16, int4;
} int_pack_job;

/* max |w| of source row r. */
static float row_most(const int_pack_job *job, int64_t r) {
    const uint16_t *half = (const uint16_t *)job->source + r * job->ld;
    const float *full = (const float *)job->source + r * job->ld;
    vf top = {};
    for (int64_t i = 0; i < job->k; i += W) {
        int count = job->k - i < W ? (int)(job->k - i) : W;
        top = vmax(vabs(job->from_bf16 ? vload_bf16_n(half + i, count) : vload_n(full + i, count)), top);
    }
    return vmaximum(top);
}

/* x [GROUP][NR]: k from ``i`` on of the NR rows from ``r`` on, zero where there is none. */
static void load_group(const int_pack_job *job, int64_t r, int64_t i, float x[GROUP][NR]) {
    int64_t count = job->k - i < GROUP ? job->k - i : GROUP;
    if (r < 0 || r + NR > job->rows || count < GROUP) memset(x, 0, GROUP * NR * sizeof(float));
    for (int64_t lane = 0; lane < NR; lane++) {
        if (r + lane < 0 || r + lane >= job->rows) continue;
        int64_t from = (r + lane) * job->ld + i;
        if (job->from_bf16)
            for (int64_t j = 0; j < count; j++) x[j][lane] = bf16_to_float(((const uint16_t *)job->source)[from + j]);
        else
            for (int64_t j = 0; j < count; j++) x[j][lane] = ((const float *)job->source)[from + j];
    }
}

INLINE vi vfloor(vf x) {
    vi towards_zero = __builtin_convertvector(x, vi);
    return towards_zero + (__builtin_convertvector(towards_zero, vf) > x); /* true is -1 */
}

/* q of w8 = (q * step + offset) >> INT4_SHIFT nearest to v. */
INLINE vi int4_nearest(vf v, vf inverse, vf bias) {
    vf q = vfma(v, inverse, bias);
    return __builtin_convertvector(vmin(vmax(q, vset1(0.0f)), vset1(15.0f)), vi);
}

/* x [GROUP][NR] from lane ``at`` on as int4, in units of int8 numbers (1 / unit): of some ranges, each smaller than the
 * one before, that with the least squared error. */
static void quantize_group(const float x[GROUP][NR], int at, vf unit, vi *step, vi *offset, vi q[GROUP]) {
    enum { HALF = 1 << (INT4_SHIFT - 1), ONE = 1 << INT4_SHIFT };
    vf v[GROUP], high = {}, low = {}, best = vset1(__builtin_inff());
    for (int j = 0; j < GROUP; j++) {
        v[j] = vload(&x[j][at]) * unit;
        high = vmax(v[j], high);
        low = vmin(v[j], low);
    }
    for (int choice = 0; choice < PACK_CHOICES; choice++) {
        vf shrink = vset1(1.0f - 0.05f * (float)choice), errors = {};
        vi s = __builtin_convertvector((high - low) * shrink / vset1(15.0f) * vset1(ONE) + vset1(0.5f), vi);
        s += (s < 1) & (1 - s);
        vi from = vfloor(low * shrink * vset1(ONE) + vset1(0.5f));
        vf width = __builtin_convertvector(s, vf), inverse = vset1(ONE) / width;
        vf bias = vset1(0.5f) - __builtin_convertvector(from, vf) / width;
        for (int j = 0; j < GROUP; j++) {
            vi w8 = (int4_nearest(v[j], inverse, bias) * s + from + HALF) >> INT4_SHIFT;
            vf off = v[j] - __builtin_convertvector(w8, vf);
            errors = vfma(off, off, errors);
        }
        vi better = errors < best;
        best = vselect(better, errors, best);
        *step = choice ? (s & better) | (*step & ~better) : s;
        *offset = choice ? (from & better) | (*offset & ~better) : from;
    }
    vf width = __builtin_convertvector(*step, vf), inverse = vset1(ONE) / width;
    vf bias = vset1(0.5f) - __builtin_convertvector(*offset, vf) / width;
    for (int j = 0; j < GROUP; j++) q[j] = int4_nearest(v[j], inverse, bias);
    *offset += HALF;
}

/* Put one small number of each lane beside those of other lanes: bytes = 2 or 4 each, zero where there is nothing yet. */
INLINE void merge_lanes(char *at, vi numbers, int bytes) {
    if (bytes == 4) {
        vi there = viload(at) | numbers;
        memcpy(at, &there, sizeof there);
        return;
    }
    typedef uint16_t vh __attribute__((vector_size(W * 2)));
    vh there, more = __builtin_convertvector(numbers, vh);
    memcpy(&there, at, sizeof there);
    there |= more;
    memcpy(at, &there, sizeof there);
}

/* Groups stand as int4_position() says: four k of a lane are two bytes. */
static void pack_int4_group(const int_pack_job *job, char *group, int64_t r, const float x[GROUP][NR], const vf *units) {
    for (int at = 0; at < NR; at += W) {
        vi step, offset, q[GROUP];
        quantize_group(x, at, units[at / W], &step, &offset, q);
        for (int lane = 0; lane < W; lane++) {
            if (r + at + lane < 0 || r + at + lane >= job->rows) continue;
            ((uint16_t *)group)[at + lane] = (uint16_t)step[lane];
            ((int16_t *)group)[NR + at + lane] = (int16_t)offset[lane];
        }
        for (int j = 0; j < GROUP; j += 4) {
            vi second = q[j + (UNIT == 4 ? 1 : 2)], third = q[j + (UNIT == 4 ? 2 : 1)];
            vi four = q[j] | second << 4 | third << 8 | q[j + 3] << 12;
            merge_lanes(group + GROUP_PARAMETERS + (j / 4 * NR + at) * 2, four, 2);
        }
    }
}

/* Rounded to nearest, UNIT k of a lane beside each other, as int8_position() says. */
static void pack_int8_group(char *group, const float x[GROUP][NR], const vf *units) {
    for (int at = 0; at < NR; at += W)
        for (int j = 0; j < GROUP; j += UNIT) {
            vi numbers = {};
            for (int u = 0; u < UNIT; u++) {
                vf v = vload(&x[j + u][at]) * units[at / W];
                vi half = (as_vi(v) & INT32_MIN) | as_vi(vset1(0.5f));
                numbers |= (__builtin_convertvector(v + as_vf(half), vi) & 255) << 8 * u;
            }
            merge_lanes(group + (j / UNIT * NR + at) * UNIT, numbers, UNIT);
        }
}

static void pack_int_panel(const void *context, int64_t item) {
    const int_pack_job *job = context;
    int64_t panel = job->first / NR + item, k = job->k, r = panel * NR - job->first; /* the row in lane 0 */
    char *out = job->packed + panel * int_panel_bytes(k, job->int4);
    float *scales = (float *)int_scales(job->packed, job->n, k, job->int4), unit[NR] = {}, x[GROUP][NR];
    vf units[NR / W];
    for (int64_t lane = 0; lane < NR; lane++) {
        if (r + lane < 0 || r + lane >= job->rows) continue;
        float most = row_most(job, r + lane);
        scales[panel * NR + lane] = most / 127.0f;
        unit[lane] = most > 0.0f ? 1.0f / (most / 127.0f) : 0.0f;
    }
    for (int i = 0; i < NR / W; i++) units[i] = vload(unit + i * W);
    for (int64_t i = 0; i < k; i += GROUP) {
        load_group(job, r, i, x);
        if (job->int4) pack_int4_group(job, out + i / GROUP * INT4_GROUP_BYTES, r, x, units);
        else pack_int8_group(out + i * NR, x, units);
    }
}

/* As pb_pack_linear, quantising each row. ``n`` is the number of outputs of the whole packed matrix. What is packed to is
 * zero before. */
EXPORT void pb_pack_int(void *packed, const void *source, int64_t n, int64_t first, int64_t rows, int64_t k, int64_t ld,
                        int64_t from_bf16, int64_t dtype, int64_t threads) {
    int_pack_job job = {packed, source, n, first, rows, k, ld, (int)from_bf16, dtype == DTYPE_INT4};
    pb_parallel(pack_int_panel, &job, (first + rows - 1) / NR - first / NR + 1, (int)threads);
}
