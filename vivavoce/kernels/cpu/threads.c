/* Tasks on threads. */

#include "kernels.h"

/* GNU OpenMP's: runs a task on each of so many threads, the calling one among them, and returns when all are done. */
typedef void parallel_t(void (*task)(void *), void *argument, unsigned threads, unsigned flags);

static parallel_t *parallel;

void set_parallel(parallel_t *function) { parallel = function; }

void run_on_threads(void (*task)(void *), void *argument, int64_t threads) {
    if (parallel && threads > 1)
        parallel(task, argument, (unsigned)threads, 0);
    else
        task(argument);
}
