/* Instruction sets beyond the portable one, as bits of pb_instruction_sets(); targets.py has the same table. */
#ifndef PB_PROCESSOR_H
#define PB_PROCESSOR_H

enum {
    PB_HAS_AVX2 = 1, PB_HAS_AVX2_VNNI = 2, PB_HAS_AVX512 = 4, PB_HAS_AVX512_VNNI = 8, PB_HAS_AMX = 16,
    PB_HAS_AVX512_BF16 = 32
};

int pb_tile_registers(void); /* whether this process may use the matrix unit */

#endif
