/* Activations that are multiplied with codes of blocks: integers and what belongs to them. */
#ifndef PB_BLOCK_ROWS_H
#define PB_BLOCK_ROWS_H

#include "blocks.h"

/* How the numbers of four consecutive k lie. PAIRS: 16 bits, the first, the third, the second, the fourth, as
 * code_pairs() has codes, with a scale for each BLOCK. BYTES: the same as two signed bytes, the low ones of all, then
 * the high ones. ONE_BYTE: 8 bits, with a scale for each GROUP, which float sums of runs are already multiplied with. */
enum { PAIRS, BYTES, ONE_BYTE, MODES };

/* M rows of k. Per run of k with one weight scale the sum of the numbers, as a float where the format has minima, else
 * times the negative offset as an integer, with which the sum of products begins. */
typedef struct {
    char *numbers;
    int32_t *sums;
    float *scales;
    int64_t stride, runs, scaled; /* of a row: bytes of numbers, runs, scales */
} block_rows;

INLINE int scale_k(int mode) { return mode == ONE_BYTE ? GROUP_K : BLOCK; }
INLINE int bytes_of_four(int mode) { return mode == ONE_BYTE ? 4 : 8; }

/* The rows of x [M, K] in memory of the calling thread. */
block_rows pb_block_rows(const linear_job *linear, const block_format *format, int mode);

/* From a row and a BLOCK on. */
INLINE block_rows rows_from(const block_rows *x, const block_format *format, int mode, int64_t row, int64_t block) {
    return (block_rows){x->numbers + row * x->stride + block * BLOCK / 4 * bytes_of_four(mode),
                        x->sums + row * x->runs + block * BLOCK / scaled_k(format->codes),
                        x->scales + row * x->scaled + block * BLOCK / scale_k(mode), x->stride, x->runs, x->scaled};
}

#endif
