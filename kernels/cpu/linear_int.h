/* Integer weights: layout and quantisation, shared by the vector and the matrix unit kernels.
 *
 * int8: one scale per output, weight = scale * w8. int4: groups of 32 k; w8 = (q * step + offset) >> 8 with
 * the group's integers step and offset and q = 0 .. 15, then as
 *   int8. So a group has a range and a zero point of its own, and the arithmetic after the expansion, which takes place in
 *   the cache, is that of int8.
 * Activations: 14 bits and one scale per row, q = hi * 128 + lo; sums are exact integers.
 *
 * K is padded to whole steps of 64. Panels of NR outputs. int8: [K/UNIT][NR][UNIT]. int4: per group NR steps
 * (uint16), NR offsets (int16), then nibbles as int4_position() says. After all panels: one fp32 scale per
 * output.
 */
#ifndef PB_LINEAR_INT_H
#define PB_LINEAR_INT_H

#include "panels.h"

enum {
    INT_STEP = 64,
    GROUP = 32,
    UNIT = PB_AMX ? 4 : 2,  /* consecutive k of one output that are multiplied together */
    ACTIVATION_BITS = 14,
    LOW_BITS = ACTIVATION_BITS / 2,                    /* an activation is high * 128 + low where bytes are multiplied */
    FEW_ROWS = 4,                                      /* the most that linear_few.c takes */
    ACTIVATION_MAX = (1 << (ACTIVATION_BITS - 1)) - 1,
    INT4_SHIFT = 8,
    GROUP_PARAMETERS = NR * 4,                         /* bytes of steps and offsets */
    INT4_GROUP_BYTES = GROUP_PARAMETERS + GROUP * NR / 2,
};

INLINE int64_t int_padded_k(int64_t k) { return ceil_div(k, INT_STEP) * INT_STEP; }

INLINE int64_t int_panel_bytes(int64_t k, int int4) {
    return int4 ? int_padded_k(k) / GROUP * INT4_GROUP_BYTES : int_padded_k(k) * NR;
}

INLINE const float *int_scales(const void *weights, int64_t n, int64_t k, int int4) {
    return (const float *)((const char *)weights + panels_of(n) * int_panel_bytes(k, int4));
}

/* Where weight (k, lane) of an int8 panel is. */
INLINE int64_t int8_position(int64_t k, int64_t lane) { return (k / UNIT * NR + lane) * UNIT + k % UNIT; }

/* Where weight (k, lane) of a group is among the nibbles: which byte, and whether in its high half. UNIT 4: a
 * byte is two consecutive k, so that high and low halves expand to the odd and even bytes of the int8 panel.
 * UNIT 2: a byte is k and k + 2; the low halves of 2 W bytes expand to one vector of 16-bit pairs, the high
 * halves to that of the next pairs. */
INLINE int64_t int4_position(int64_t k, int64_t lane, int *high) {
    *high = UNIT == 4 ? k % 2 : k / 2 % 2;
    return (k / 4 * NR + lane) * 2 + (UNIT == 4 ? k / 2 % 2 : k % 2);
}

/* The weight itself, for what need not be fast. */
INLINE int int_weight(const char *panel, int64_t k, int64_t lane, int int4) {
    if (!int4) return ((const int8_t *)panel)[int8_position(k, lane)];
    const char *group = panel + k / GROUP * INT4_GROUP_BYTES;
    int high;
    int64_t byte = int4_position(k % GROUP, lane, &high);
    int q = ((const uint8_t *)group)[GROUP_PARAMETERS + byte] >> (high ? 4 : 0) & 15;
    return (q * ((const uint16_t *)group)[lane] + ((const int16_t *)group)[NR + lane]) >> INT4_SHIFT;
}

/* out [rows][padded k] = x * ACTIVATION_MAX / max|x| in 14 bits; returns the scale. A row with a NaN gets a
 * NaN scale. */
INLINE float row_scale(const float *x, int64_t k, float *inverse) {
    vf top = {}, bad = {};
    for (int64_t i = 0; i < k; i += W) {
        vf v = vload_n(x + i, k - i < W ? (int)(k - i) : W);
        top = vmax(vabs(v), top);
        bad = vfma(v, (vf){}, bad);
    }
    float most = vmaximum(top);
    *inverse = most > 0.0f ? (float)ACTIVATION_MAX / most : 0.0f;
    return most / (float)ACTIVATION_MAX + vsum(bad);
}

/* Round to nearest, as int32; |x| <= 2^22. */
INLINE vi vround(vf x) {
    const vf magic = vset1(12582912.0f);
    return as_vi(x + magic) - as_vi(magic);
}

/* Write row ``row`` of a panel: its sums over the low and the high halves of the activations, scaled. */
INLINE void store_int_row(const linear_job *l, int int4, int64_t panel, int64_t row, const int32_t *low,
                          const int32_t *high, float scale) {
    const float *scales = int_scales(l->weights, l->n, l->k, int4) + panel * NR;
    vf acc[NV];
    for (int v = 0; v < NV; v++) {
        vf sum = vfma(__builtin_convertvector(viload(high + v * W), vf), vset1(1 << LOW_BITS),
                      __builtin_convertvector(viload(low + v * W), vf));
        acc[v] = sum * (vload(scales + v * W) * scale);
    }
    store_row(l->out + row * l->n + panel * NR, acc, l->bias ? l->bias + panel * NR : NULL, l->n - panel * NR);
}

void pb_linear_int(const linear_job *linear, int int4);
void pb_linear_int_few(const linear_job *linear, int int4); /* m <= FEW_ROWS, panels in the matrix unit's layout */

#endif
