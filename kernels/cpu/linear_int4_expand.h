/* int4 groups in the matrix unit's layout -> int8, 16 outputs x 4 k at a time. */
#ifndef PB_LINEAR_INT4_EXPAND_H
#define PB_LINEAR_INT4_EXPAND_H

#include "linear_int.h"

#if PB_AMX
/* Steps and offsets of the 16 outputs of one column of a group, each twice. */
typedef struct {
    __m512i step, offset;
} int4_column;

INLINE int4_column int4_load_column(const char *group, int v) {
    __m512i step = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(group + v * 32)));
    __m512i offset = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(group + NR * 2 + v * 32)));
    return (int4_column){_mm512_or_si512(step, _mm512_slli_epi32(step, 16)),
                         _mm512_or_si512(offset, _mm512_slli_epi32(offset, 16))};
}

/* The int8 number is the high byte of q * step + offset: low nibbles make the even bytes, high ones the odd
 * bytes. */
INLINE __m512i int4_expand(const int4_column *column, const char *group, int v, int quad) {
    _Static_assert(INT4_SHIFT == 8, "an int8 number is a whole byte");
    const __m512i nibble = _mm512_set1_epi16(15);
#define EIGHT_BYTES(i) (0x4707450543034101 + (i) * 0x0808080808080808) /* odd bytes of the one and the other operand */
    const __m512i high_bytes = _mm512_set_epi64(EIGHT_BYTES(7), EIGHT_BYTES(6), EIGHT_BYTES(5), EIGHT_BYTES(4),
                                                EIGHT_BYTES(3), EIGHT_BYTES(2), EIGHT_BYTES(1), EIGHT_BYTES(0));
#undef EIGHT_BYTES
    const char *from = group + GROUP_PARAMETERS + (quad * NV + v) * 32;
    _mm_prefetch(from + 4 * INT4_GROUP_BYTES, _MM_HINT_T0);
    __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from));
    __m512i even = _mm512_and_si512(both, nibble), odd = _mm512_srli_epi16(both, 4);
    even = _mm512_add_epi16(_mm512_mullo_epi16(even, column->step), column->offset);
    odd = _mm512_add_epi16(_mm512_mullo_epi16(odd, column->step), column->offset);
    return _mm512_permutex2var_epi8(even, high_bytes, odd);
}
#endif
#endif
