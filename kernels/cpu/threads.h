/* A small pool of worker threads shared by every kernel of the process. */
#ifndef PB_THREADS_H
#define PB_THREADS_H

#include <stdint.h>

/* One piece of work. Items are independent and each writes its own outputs, so that it does not matter who
 * runs which. */
typedef void (*pb_task)(const void *context, int64_t item);

/* Run task(context, 0 .. items - 1) on at most ``threads`` threads, the caller being one of them; returns
 * when all are done. */
void pb_parallel(pb_task task, const void *context, int64_t items, int threads);

/* Memory of the calling thread, kept for its life and grown when needed, 64-byte aligned. CALLER_MEMORY: what
 * a kernel prepares for its items; ITEM_MEMORY: what one item needs while it runs. Ends the process if the
 * system has none. */
enum { CALLER_MEMORY = 0, ITEM_MEMORY = 1 };
void *pb_thread_memory(int use, int64_t bytes);

#endif
