/* Threads that execute the phases of a pass, see thread_pool.c. */
#pragma once
#include "state.h"

#define MAX_THREADS 64

/* Execute all phases of `s` with `threads` threads, each with a buffer of `floats` numbers. Returns 0 without memory.
 */
int run_phases(state *s, int threads, int64_t floats);
