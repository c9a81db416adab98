/* The thread pool: why not OpenMP, and what happens when somebody else takes a core.
 *
 * A second OpenMP runtime in the process oversubscribes the cores, and which one is loaded depends on how
 * torch was built. This pool needs pthreads only. Regions are short (tens of microseconds), so:
 *   - items are picked up one by one from a counter: a slow thread simply does fewer of them;
 *   - workers spin for a moment after a region, because the next one follows at once, then sleep;
 *   - the caller never waits for a worker that has not begun: the region closes when the items are gone;
 *   - a worker that loses its core in the middle of an item does make the caller wait. That wait is measured, and
 *     a stall sends the workers to rest for many times its length, longer each time until regions run clean again, so
 *     that a busy core costs a few per cent.
 * Which thread runs an item never changes its result.
 */
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#if defined(_WIN32) /* has no aligned_alloc, and what it has instead takes its own free */
#include <malloc.h>
#define allocate_aligned(bytes) _aligned_malloc(bytes, 64)
#define free_aligned _aligned_free
#else
#define allocate_aligned(bytes) aligned_alloc(64, bytes)
#define free_aligned free
#endif
#if defined(__x86_64__) || defined(__i386__)
#define pause_cpu() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define pause_cpu() __asm__ volatile("yield")
#else
#define pause_cpu() ((void)0)
#endif

enum {
    MAX_WORKERS = 255,
    SPINS_IN_A_ROW = 64,        /* pauses between two looks at the clock */
    SPIN_NS = 100 * 1000,       /* how long an idle worker spins before it sleeps */
    STALL_NS = 300 * 1000,      /* a longer wait for others (beyond a few items' time) is a lost core */
    REST_FACTOR = 30,           /* rest = stall * REST_FACTOR * stalls in a row */
    MISSED_REGIONS = 30,        /* so many regions in a row without a worker: it has no core */
    CLEAN_REGIONS = 500,        /* regions without a stall that end a row */
    YIELD_SPINS = 2000,         /* a waiting caller then offers its core: the worker may be queued behind it */
};
static const int64_t MAX_REST_NS = 1000 * 1000 * 1000;

static struct {
    pthread_mutex_t busy; /* one region at a time; a second caller runs its items alone */
    pthread_mutex_t lock; /* for sleeping only */
    pthread_cond_t wake;
    int workers, wanted;
    int64_t rest_until;
    int stalls, clean, missed; /* stalls in a row, regions since the last, regions in a row that no worker came to */
    pb_task task;
    const void *context;
    int64_t items;
    _Alignas(64) _Atomic uint64_t generation;
    _Atomic int sleeping;
    _Alignas(64) _Atomic int64_t next;
    _Alignas(64) _Atomic int64_t gate; /* OPEN while workers may enter, plus the number inside */
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static const int64_t OPEN = (int64_t)1 << 32;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int64_t run_items(void) {
    pb_task task = pool.task;
    const void *context = pool.context;
    int64_t items = pool.items, done = 0;
    for (;; done++) {
        int64_t i = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
        if (i >= items) return done;
        task(context, i);
    }
}

/* Enter the open region, if there is one and it still has room. */
static void join_region(int index) {
    int64_t gate = atomic_load(&pool.gate);
    while (gate & OPEN)
        if (atomic_compare_exchange_weak(&pool.gate, &gate, gate + 1)) {
            if (index < pool.wanted) run_items();
            atomic_fetch_sub(&pool.gate, 1);
            return;
        }
}

#if defined(__SSE__)
static const uint64_t DEFAULT_ARITHMETIC = 0x1f80, CONTROLS = 0xffc0; /* the rest are flags of what has happened */
#else
static const uint64_t DEFAULT_ARITHMETIC = 0, CONTROLS = ~(uint64_t)0;
#endif

/* How this thread rounds and whether it flushes denormal numbers to zero. A process can set that for its threads, and
 * new ones inherit it; kernels run with what the processor starts with. Returns what was set before. */
static uint64_t set_arithmetic(uint64_t wanted) {
    uint64_t before = wanted;
#if defined(__SSE__)
    before = __builtin_ia32_stmxcsr();
    if ((before ^ wanted) & CONTROLS) __builtin_ia32_ldmxcsr((uint32_t)wanted);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    if ((before ^ wanted) & CONTROLS) __asm__ volatile("msr fpcr, %0" : : "r"(wanted));
#endif
    return before;
}

static void *worker(void *argument) {
    int index = (int)(intptr_t)argument;
    uint64_t seen = 0;
    set_arithmetic(DEFAULT_ARITHMETIC);
    for (;;) {
        int64_t began = now_ns();
        int spinning = 1;
        while (atomic_load_explicit(&pool.generation, memory_order_acquire) == seen && spinning) {
            for (int i = 0; i < SPINS_IN_A_ROW; i++) pause_cpu();
            spinning = now_ns() - began < SPIN_NS;
            sched_yield(); /* the caller may be queued behind this thread */
        }
        if (atomic_load(&pool.generation) == seen) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleeping, 1);
            while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load(&pool.generation);
        join_region(index);
    }
    return NULL;
}

/* A forked child has none of the parent's workers: it starts its own when it first needs them. */
static void after_fork(void) {
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.workers = 0;
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.gate, 0);
}

__attribute__((constructor)) static void initialise(void) { pthread_atfork(NULL, NULL, after_fork); }

static void start_workers(int count) {
    if (count > MAX_WORKERS) count = MAX_WORKERS;
    for (; pool.workers < count; pool.workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)pool.workers)) return;
        pthread_detach(thread);
    }
}

/* After a region: the caller did ``mine`` of the items in ``busy`` ns, then waited for the others. */
static void judge(int64_t mine, int64_t busy, int64_t waited) {
    pool.missed = mine == pool.items ? pool.missed + 1 : 0;
    int lost_core = waited > STALL_NS + 4 * busy / (mine ? mine : 1), never_came = pool.missed >= MISSED_REGIONS;
    if (!lost_core && !never_came) {
        if (++pool.clean >= CLEAN_REGIONS) pool.stalls = 0;
        return;
    }
    int64_t rest = (lost_core ? waited : busy * MISSED_REGIONS) * REST_FACTOR * ++pool.stalls;
    pool.clean = pool.missed = 0;
    pool.rest_until = now_ns() + (rest < MAX_REST_NS ? rest : MAX_REST_NS);
}

static void run_region(pb_task task, const void *context, int64_t items, int threads) {
    if (threads > items) threads = (int)items;
    if (threads < 2 || pthread_mutex_trylock(&pool.busy)) {
        for (int64_t i = 0; i < items; i++) task(context, i);
        return;
    }
    int64_t began = now_ns();
    if (began < pool.rest_until) {
        pthread_mutex_unlock(&pool.busy);
        for (int64_t i = 0; i < items; i++) task(context, i);
        return;
    }
    start_workers(threads - 1);
    pool.task = task;
    pool.context = context;
    pool.items = items;
    pool.wanted = threads - 1;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.gate, OPEN);
    atomic_fetch_add(&pool.generation, 1);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    int64_t mine = run_items(), closed = now_ns(), waited = 0;
    if (atomic_fetch_sub(&pool.gate, OPEN) > OPEN) { /* closed; some workers are still inside */
        for (int64_t spins = 0; atomic_load_explicit(&pool.gate, memory_order_acquire); spins++)
            if (spins < YIELD_SPINS) pause_cpu();
            else sched_yield();
        waited = now_ns() - closed;
    }
    judge(mine, closed - began, waited);
    pthread_mutex_unlock(&pool.busy);
}

void pb_parallel(pb_task task, const void *context, int64_t items, int threads) {
    uint64_t before = set_arithmetic(DEFAULT_ARITHMETIC);
    run_region(task, context, items, threads);
    set_arithmetic(before);
}

void *pb_thread_memory(int use, int64_t bytes) {
    static _Thread_local void *memory[2];
    static _Thread_local int64_t size[2];
    if (bytes > size[use]) {
        free_aligned(memory[use]);
        size[use] = (bytes + 63) / 64 * 64;
        memory[use] = allocate_aligned((size_t)size[use]);
        if (!memory[use]) abort();
    }
    return memory[use];
}
