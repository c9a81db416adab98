/* Which instruction sets this processor has and its operating system saves the registers of.
 *
 * Whoever brings libraries for several asks the portable one, and loads what suits. /proc/cpuinfo is Linux's alone.
 */
#include "processor.h"

#include "simd.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* The operating system gives the tile registers to a process that asks. */
int pb_tile_registers(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
int pb_tile_registers(void) { return 0; }
#endif

#if defined(__x86_64__)
#include <cpuid.h>

enum {
    VECTORS = 0x6,   /* state that the system saves: 128 and 256 bit registers */
    MASKS = 0xe0,    /* mask and 512 bit registers */
    TILES = 0x60000, /* those of the matrix unit */
};

static uint64_t saved_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low | (uint64_t)high << 32;
}

/* Whether ``bits`` has all bits that are named. */
#define HAS(bits, ...) has_all(bits, (const int[]){__VA_ARGS__, -1})
static int has_all(uint32_t bits, const int *wanted) {
    for (; *wanted >= 0; wanted++)
        if (!(bits >> *wanted & 1)) return 0;
    return 1;
}

EXPORT int64_t pb_instruction_sets(void) {
    enum { FMA = 12, XSAVE = 27, AVX = 28, F16C = 29 };                               /* leaf 1, ecx */
    enum { AVX2 = 5, F = 16, DQ = 17, BW = 30, VL = 31 };                             /* leaf 7, ebx */
    enum { VBMI = 1, VNNI = 11 };                                                     /* leaf 7, ecx */
    enum { AMX_BF16 = 22, AMX_TILE = 24, AMX_INT8 = 25 };                             /* leaf 7, edx */
    enum { AVX_VNNI = 4, AVX512_BF16 = 5 };                                                           /* leaf 7.1, eax */
    uint32_t a, b, c, d, b7, c7, d7, a71 = 0, leaves;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !HAS(c, FMA, XSAVE, AVX, F16C)) return 0;
    uint64_t saved = saved_state();
    if ((saved & VECTORS) != VECTORS || !__get_cpuid_count(7, 0, &leaves, &b7, &c7, &d7) || !HAS(b7, AVX2)) return 0;
    if (leaves) __get_cpuid_count(7, 1, &a71, &b, &c, &d);
#if defined(__APPLE__)
    saved |= MASKS; /* its system saves them from their first use on, and says so only then */
#endif
    int64_t found = PB_HAS_AVX2;
    if (HAS(a71, AVX_VNNI)) found |= PB_HAS_AVX2_VNNI;
    if ((saved & MASKS) != MASKS || !HAS(b7, F, DQ, BW, VL)) return found;
    found |= PB_HAS_AVX512;
    if (!HAS(c7, VNNI)) return found;
    found |= PB_HAS_AVX512_VNNI;
    if (HAS(a71, AVX512_BF16)) found |= PB_HAS_AVX512_BF16;
    if ((saved & TILES) == TILES && HAS(c7, VBMI) && HAS(d7, AMX_BF16, AMX_TILE, AMX_INT8) && pb_tile_registers())
        found |= PB_HAS_AMX;
    return found;
}
#else
EXPORT int64_t pb_instruction_sets(void) { return 0; } /* what is portable here has all vectors that are used */
#endif
