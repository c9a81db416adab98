/* Activations as integers, with a scale of each BLOCK of a row. */
#include "block_rows.h"
#include "threads.h"

enum { LARGEST = 127 * 257, LARGEST_BYTE = 127 }; /* 127 * 257: two signed bytes; 255 * LARGEST * 32 < 2^31 */

typedef struct {
    const float *x;
    const block_format *format;
    block_rows rows;
    int64_t k;
    int mode;
} rows_job;

/* number [count] = x / scale, rounded; returns the scale, which is NaN where an x is not finite. */
static float to_integers(const float *x, int64_t count, float largest, int32_t *number) {
    const vf magic = vset1(12582912.0f); /* adding it rounds to an integer kept in the low bits */
    vf top = vset1(0x1p-100f), bad = {};  /* what is smaller need not be told from zero */
    for (int64_t i = 0; i < count; i += W) {
        vf v = vload(x + i);
        top = vmax(vabs(v), top);
        bad = vfma(v, (vf){}, bad);
    }
    float most = vmaximum(top), inverse = largest / most;
    for (int64_t i = 0; i < count; i += W) {
        vf v = vmax(vmin(vload(x + i) * inverse, vset1(largest)), vset1(-largest)); /* also if it is NaN */
        vi rounded = as_vi(v + magic) - as_vi(magic);
        memcpy(number + i, &rounded, sizeof rounded);
    }
    return most / largest + vsum(bad);
}

static void put_numbers(char *out, const int32_t *number, int64_t count, int mode) {
    if (mode == PAIRS) {
        int16_t *pairs = (int16_t *)out;
        for (int64_t i = 0; i < count; i += 4) {
            pairs[i] = (int16_t)number[i], pairs[i + 1] = (int16_t)number[i + 2];
            pairs[i + 2] = (int16_t)number[i + 1], pairs[i + 3] = (int16_t)number[i + 3];
        }
    } else if (mode == BYTES) {
        int8_t *bytes = (int8_t *)out;
        for (int64_t i = 0; i < count; i += 4)
            for (int j = 0; j < 4; j++) {
                int8_t low = (int8_t)number[i + j];
                bytes[2 * i + j] = low;
                bytes[2 * i + 4 + j] = (int8_t)((number[i + j] - low) >> 8);
            }
    } else
        for (int64_t i = 0; i < count; i++) out[i] = (char)number[i];
}

static void prepare_row(const void *context, int64_t row) {
    const rows_job *job = context;
    const int64_t k = job->k, run = scaled_k(job->format->codes), step = scale_k(job->mode);
    const float *x = job->x + row * k, largest = job->mode == ONE_BYTE ? LARGEST_BYTE : LARGEST;
    const int signed_codes = PB_SIGNED_CODES && job->mode != PAIRS && any_byte(job->format->codes);
    const int offset = signed_codes ? 0 : job->format->offset;
    char *out = job->rows.numbers + row * job->rows.stride;
    int32_t *sums = job->rows.sums + row * job->rows.runs, number[BLOCK];
    for (int64_t i = 0; i < job->rows.scaled; i++) {
        int64_t count = k - i * step < step ? k - i * step : step;
        float scale = to_integers(x, count, largest, number);
        job->rows.scales[row * job->rows.scaled + i] = scale;
        put_numbers(out, number, count, job->mode);
        for (int64_t from = 0; from < count; from += run, sums++) {
            int32_t sum = 0;
            for (int64_t j = 0; j < run; j++) sum += number[from + j];
            float as_float = (float)sum * (job->mode == ONE_BYTE ? scale : 1.0f);
            *sums = -offset * sum;
            if (has_minima(job->format)) memcpy(sums, &as_float, 4);
        }
        x += count, out += count / 4 * bytes_of_four(job->mode);
    }
}

block_rows pb_block_rows(const linear_job *linear, const block_format *format, int mode) {
    const int64_t m = linear->m, k = linear->k;
    rows_job job = {linear->x, format, {.stride = k / 4 * bytes_of_four(mode)}, k, mode};
    job.rows.runs = k / scaled_k(format->codes);
    job.rows.scaled = ceil_div(k, scale_k(mode));
    job.rows.numbers = pb_thread_memory(CALLER_MEMORY, m * (job.rows.stride + 4 * job.rows.runs + 4 * job.rows.scaled));
    job.rows.sums = (int32_t *)(job.rows.numbers + m * job.rows.stride);
    job.rows.scales = (float *)(job.rows.sums + m * job.rows.runs);
    pb_parallel(prepare_row, &job, m, m * k < 1 << 16 ? 1 : linear->threads);
    return job.rows;
}
