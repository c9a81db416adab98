/* Online softmax of attention: scores of a key tile become weights, partial results of segments become one.
 *
 * Everything is in base 2: scores arrive multiplied by log2(e). Maxima, sums and rescales are per row and per
 * key tile; a row's sum is kept as W partial sums until the segment ends.
 */
#ifndef PB_SOFTMAX_H
#define PB_SOFTMAX_H

#include "attention_tile.h"

#include <math.h>

enum { ROWS = 48 }; /* rows handled at once, a multiple of W and of TILE_ROWS */

#define LOG2_E 1.44269504f

typedef struct {
    float score[ROWS][KEYS], sum[ROWS][W];
    float maximum[ROWS], rescale[ROWS];
} softmax_rows;

INLINE float exp2_of(float x) { return vexp2(vset1(x))[0]; }

INLINE void softmax_start(softmax_rows *s, int rows) {
    for (int r = 0; r < rows; r++) s->maximum[r] = -INFINITY;
    memset(s->sum, 0, sizeof s->sum[0] * (size_t)rows);
}

/* Hide what a row does not see, cap the scores, and return their maximum. The row sees tokens [first, last) of
 * the tile; [0, width) are written, whatever was there. cap: softcap * log2(e), or 0. */
INLINE float visible_maximum(float *row, int first, int last, int width, float softcap) {
    vf top = vset1(-INFINITY);
    if (first <= 0 && last >= width && softcap <= 0.0f) {
        for (int i = 0; i < width; i += W) top = vmax(top, vload(row + i));
        return vmaximum(top);
    }
    for (int i = 0; i < width; i += W) {
        vi lane = vlanes() + i;
        vf x = vload(row + i);
        if (softcap > 0.0f) x = softcap * LOG2_E * vtanh(x / softcap);
        x = vselect((lane >= first) & (lane < last), x, vset1(-INFINITY));
        vstore(row + i, x);
        top = vmax(top, x);
    }
    return vmaximum(top);
}

/* Turn the first ``width[r]`` scores of each row into weights and update its maximum and sum. next: the maxima
 * from this tile on. A row that has seen nothing yet gets weights of 0. */
INLINE void softmax_weights(softmax_rows *s, const float *next, const int *width, int rows) {
    for (int r = 0; r < rows; r += W) {
        vf before = vload(s->maximum + r), now = vload(next + r);
        vstore(s->rescale + r, vselect(before == now, vset1(1.0f), vexp2(before - now)));
        vstore(s->maximum + r, now);
    }
    for (int r = 0; r < rows; r++) {
        float *row = s->score[r];
        vf top = vset1(next[r] == -INFINITY ? 0.0f : next[r]), sum = vload(s->sum[r]) * s->rescale[r];
        for (int i = 0; i < width[r]; i += W) {
            vf x = vexp2(vload(row + i) - top);
            vstore(row + i, x);
            sum += x;
        }
        vstore(s->sum[r], sum);
    }
}

/* (out, maximum, sum) += (part, part_maximum, part_sum): two softmax parts become one. */
INLINE void softmax_merge(float *out, float *maximum, float *sum, const float *part, float part_maximum, float part_sum,
                          int64_t d) {
    if (part_sum == 0.0f) return; /* a segment of which the row sees nothing */
    float top = *maximum > part_maximum ? *maximum : part_maximum;
    float mine = exp2_of(*maximum - top), theirs = exp2_of(part_maximum - top);
    for (int64_t i = 0; i < d; i += W) {
        int n = d - i < W ? (int)(d - i) : W;
        vstore_n(out + i, vfma(vload_n(part + i, n), vset1(theirs), vload_n(out + i, n) * mine), n);
    }
    *sum = vfma(vset1(part_sum), vset1(theirs), vset1(*sum * mine))[0];
    *maximum = top;
}

/* out = row / sum, with the sink's share in the sum if there is one. */
INLINE void softmax_finish(float *out, const float *row, float maximum, float sum, const float *sink, int64_t d) {
    float scale = 1.0f;
    if (sink) {
        float own = *sink * LOG2_E, top = maximum > own ? maximum : own;
        scale = exp2_of(maximum - top);
        sum = sum * scale + exp2_of(own - top);
    }
    scale /= sum;
    for (int64_t i = 0; i < d; i++) out[i] = row[i] * scale;
}

#endif
