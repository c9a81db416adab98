/* Packing of fp32 and bf16 weights. */
#include "linear_float.h"
#include "threads.h"

/* Copy ``rows`` rows (source [rows][ld], fp32 or bf16) into zero-filled packed weights, as outputs from
 * ``first`` on. */
typedef struct {
    char *packed;
    const char *source;
    int64_t first, rows, k, ld;
    int from_bf16, to_bf16;
} pack_job;

static void pack_panel(const void *context, int64_t item) {
    const pack_job *job = context;
    int64_t panel = job->first / NR + item, k = job->k;
    char *out = job->packed + panel * panel_bytes(k, job->to_bf16);
    for (int lane = 0; lane < NR; lane++) {
        int64_t row = panel * NR + lane - job->first;
        if (row < 0 || row >= job->rows) continue;
        const float *floats = (const float *)job->source + row * job->ld;
        const uint16_t *halves = (const uint16_t *)job->source + row * job->ld;
        if (job->to_bf16)
            for (int64_t i = 0; i < k; i++) {
                uint16_t value = job->from_bf16 ? halves[i] : float_to_bf16(floats[i]);
                ((uint16_t *)out)[((i / 2) * NR + lane) * 2 + (i & 1)] = value;
            }
        else
            for (int64_t i = 0; i < k; i++)
                ((float *)out)[i * NR + lane] = job->from_bf16 ? bf16_to_float(halves[i]) : floats[i];
    }
}

EXPORT void pb_pack_linear(void *packed, const void *source, int64_t first, int64_t rows, int64_t k, int64_t ld,
                           int64_t from_bf16, int64_t dtype, int64_t threads) {
    pack_job job = {packed, source, first, rows, k, ld, (int)from_bf16, dtype == DTYPE_BFLOAT16};
    pb_parallel(pack_panel, &job, (first + rows - 1) / NR - first / NR + 1, (int)threads);
}

/* 1 if every float of source is exactly a bf16 number. */
EXPORT int64_t pb_bf16_exact(const void *source, int64_t count) {
    const uint32_t *words = source;
    for (int64_t i = 0; i < count; i++)
        if (words[i] & 0xffff) return 0;
    return 1;
}
