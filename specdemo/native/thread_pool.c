/* Threads that execute the phases of a pass. The caller is thread 0; the others are started when first needed and never
 * end. The chunks of a phase are divided into a range per thread, so that contended writes are few. The pool is in one
 * of these states, and `busy` admits one caller at a time:
 *
 * - idle: `running` is 0 and no ticket has a chunk. The caller leaves; the next one opens its first phase.
 * - open: tickets have chunks. A thread claims those of its range by incrementing its ticket, then those of the others.
 *   A ticket contains the number of the phase (32 bits), the end of the range (16) and the next chunk (16).
 * - closing: all chunks are claimed, and fewer than `chunks` are `done`. A thread without a chunk spins until `opened`
 *   changes, and sleeps on `changed` after SPINS; nobody waits for a thread that has no chunk.
 * - serial: the thread that completes the last chunk executes finish_phase(), which selects the next phase. It then
 * opens that phase, or sets `running` to 0.
 *
 * Threads beyond `threads` sleep on `enlarged`. After fork(), also during a pass, the child has no threads and starts
 * its own. */
#include "state.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define SPINS 20000 /* about 0.2 ms, longer than a decoding step without its passes */
#define YIELD 256   /* spins between calls of sched_yield() */
#define MOST_PARTS 16

#define OWN_LINE __attribute__((aligned(64)))

typedef struct {
    const char *at;
    int64_t bytes;
} part;

static struct {
    struct {
        _Atomic uint64_t ticket;
    } OWN_LINE ranges[MAX_THREADS];
    _Atomic uint32_t done OWN_LINE; /* chunks of the phase */
    _Atomic uint32_t opened OWN_LINE, sleepers, running;
    state *now;
    int first_phase;         /* ticket's number of phase 0 */
    _Atomic int threads;     /* participants; the others sleep until there are more */
    uint32_t number, chunks; /* of the phase */
    int started;
    pthread_mutex_t busy, mutex;
    pthread_cond_t changed, enlarged;
    part expected[MOST_PARTS]; /* weights of the next pass; guarded by `mutex` */
    _Atomic int expected_count;
    float *buffers[MAX_THREADS + 1]; /* of the threads, and a common one */
    int64_t sizes[MAX_THREADS + 1];
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .mutex = PTHREAD_MUTEX_INITIALIZER,
          .changed = PTHREAD_COND_INITIALIZER,
          .enlarged = PTHREAD_COND_INITIALIZER};

static int is_open(uint64_t t) { return (t & 0xffff) < (t >> 16 & 0xffff); }

static void wake_threads(void) {
    atomic_fetch_add(&pool.opened, 1);
    if (!atomic_load(&pool.sleepers)) return;
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&pool.changed);
    pthread_mutex_unlock(&pool.mutex);
}

static void open_phase(uint32_t number, int64_t chunks) {
    pool.number = number, pool.chunks = (uint32_t)chunks;
    atomic_store(&pool.done, 0);
    for (int t = 0, threads = atomic_load(&pool.threads); t < threads; t++) {
        uint64_t first = (uint64_t)(chunks * t / threads), end = (uint64_t)(chunks * (t + 1) / threads);
        atomic_store_explicit(&pool.ranges[t].ticket, (uint64_t)number << 32 | end << 16 | first, memory_order_release);
    }
    wake_threads();
}

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Run the remaining chunks of a range. The phase cannot end before they are counted. */
static int run_range(int range, int thread) {
    uint32_t count = 0;
    uint64_t t;
    int64_t *times = 0, start = 0;
    while (is_open(atomic_load(&pool.ranges[range].ticket)) &&
           is_open(t = atomic_fetch_add(&pool.ranges[range].ticket, 1))) {
        state *s = pool.now;
        int phase = (int)((uint32_t)(t >> 32) - (uint32_t)pool.first_phase);
        if (!count++ && s->p->times) times = s->p->times + stage_of(s, phase), start = nanoseconds();
        run_chunk(s, phase, t & 0xffff, pool.buffers[thread]);
    }
    if (!count) return 0;
    if (times) __atomic_fetch_add(times, nanoseconds() - start, __ATOMIC_RELAXED);
    uint32_t number = pool.number, chunks = pool.chunks;
    if (atomic_fetch_add(&pool.done, count) + count < chunks) return 1;
    state *s = pool.now;
    int phase = (int)(number - (uint32_t)pool.first_phase);
    if (s->p->times) times = s->p->times + TIMES + stage_of(s, phase), start = nanoseconds();
    int next = finish_phase(s, phase);
    if (times) *times += nanoseconds() - start;
    if (next >= 0)
        open_phase(number + (uint32_t)(next - phase), chunk_count(s, next));
    else
        atomic_store(&pool.running, 0), wake_threads(); /* the caller may start the next pass between these */
    return 1;
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Read the expected weights into the caches until `opened` differs from `seen`. They may be freed meanwhile: addresses
 * of prefetches need not be valid. */
static void prefetch_expected(uint32_t seen) {
    part parts[MOST_PARTS];
    pthread_mutex_lock(&pool.mutex);
    int count = atomic_exchange(&pool.expected_count, 0);
    memcpy(parts, pool.expected, sizeof parts);
    pthread_mutex_unlock(&pool.mutex);
    for (int i = 0; i < count; i++)
        for (int64_t at = 0; at < parts[i].bytes && atomic_load(&pool.opened) == seen; at += 64)
            __builtin_prefetch(parts[i].at + at, 0, 2);
}

/* Wait until `opened` differs from `seen`: spin, then sleep. */
static void wait_for_phase(uint32_t seen) {
    if (atomic_load(&pool.expected_count)) prefetch_expected(seen);
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load(&pool.opened) != seen) return;
        if (i % YIELD == YIELD - 1)
            sched_yield();
        else
            pause_briefly();
    }
    pthread_mutex_lock(&pool.mutex);
    atomic_fetch_add(&pool.sleepers, 1);
    while (atomic_load(&pool.opened) == seen) pthread_cond_wait(&pool.changed, &pool.mutex);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.mutex);
}

static void work(int thread, int is_caller) {
    for (;;) {
        uint32_t seen = atomic_load(&pool.opened);
        if (is_caller && !atomic_load(&pool.running)) return;
        int threads = atomic_load(&pool.threads), ran = 0;
        if (thread >= threads) {
            pthread_mutex_lock(&pool.mutex);
            while (thread >= atomic_load(&pool.threads)) pthread_cond_wait(&pool.enlarged, &pool.mutex);
            pthread_mutex_unlock(&pool.mutex);
            continue;
        }
        for (int i = 0; i < threads && !ran; i++) ran = run_range((thread + i) % threads, thread);
        if (!ran) wait_for_phase(seen);
    }
}

static void set_threads(int count) {
    if (atomic_load(&pool.threads) == count) return;
    pthread_mutex_lock(&pool.mutex);
    atomic_store(&pool.threads, count);
    pthread_cond_broadcast(&pool.enlarged);
    pthread_mutex_unlock(&pool.mutex);
}

static void *worker(void *thread) {
    work((int)(intptr_t)thread, 0);
    return 0;
}

static int enlarge(int t, int64_t floats) {
    if (pool.sizes[t] >= floats) return 1;
    void *larger_buffer;
    if (posix_memalign(&larger_buffer, 64, (size_t)floats * sizeof(float))) return 0;
    free(pool.buffers[t]);
    pool.buffers[t] = larger_buffer, pool.sizes[t] = floats;
    return 1;
}

static int prepare_threads(int threads, int64_t floats) {
    for (int t = 0; t < threads || t <= pool.started; t++) /* also of threads that leave the previous pass */
        if (!enlarge(t, floats)) return 0;
    for (; pool.started < threads - 1; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, worker, (void *)(intptr_t)(pool.started + 1))) break;
        pthread_detach(thread);
    }
    return 1;
}

/* Buffers stay allocated: another thread may have been replacing one. */
static void reset_in_child(void) {
    pthread_mutex_init(&pool.busy, 0), pthread_mutex_init(&pool.mutex, 0);
    pthread_cond_init(&pool.changed, 0), pthread_cond_init(&pool.enlarged, 0);
    pool.started = 0;
    atomic_store(&pool.sleepers, 0), atomic_store(&pool.running, 0), atomic_store(&pool.threads, 0);
    for (int t = 0; t < MAX_THREADS; t++) atomic_store(&pool.ranges[t].ticket, 0);
    for (int t = 0; t <= MAX_THREADS; t++) pool.buffers[t] = 0, pool.sizes[t] = 0;
}

__attribute__((constructor)) static void register_fork_handler(void) { pthread_atfork(0, 0, reset_in_child); }

/* Execute all phases of `s` with `threads` threads, each with a buffer of `floats` numbers. Returns 0 without memory.
 */
int run_phases(state *s, int threads, int64_t floats) {
    pthread_mutex_lock(&pool.busy);
    int ready = prepare_threads(threads, floats) && enlarge(MAX_THREADS, section_floats(s->p));
    if (ready) {
        divide_attention(s, pool.buffers[MAX_THREADS]);
        pool.now = s;
        set_threads(threads);
        uint32_t number = pool.number + 1;
        pool.first_phase = (int)(number - (uint32_t)s->first);
        atomic_store(&pool.running, 1);
        open_phase(number, chunk_count(s, s->first));
        work(0, 1);
    }
    pthread_mutex_unlock(&pool.busy);
    return ready;
}

static void expect_weights(const matrix *m) {
    if (!m || !m->weights || pool.expected_count + 2 > MOST_PARTS) return;
    int64_t blocks = block_count(m), inputs = has_bytes(m->form) ? activation_stride(m) : m->inputs;
    pool.expected[pool.expected_count++] = (part){m->weights, blocks * inputs * input_bytes(m->form)};
    int64_t groups = FORMATS[m->form].scales ? m->inputs / group_inputs(m) : 0;
    pool.expected[pool.expected_count++] = (part){m->scales, blocks * groups * scale_bytes(m->form)};
}

/* Wake the threads before a pass of a small model, whose weights the passes of a larger one have displaced from the
 * caches; they read the weights while the caller prepares the pass. */
void expect_pass(const model *m) {
    pthread_mutex_lock(&pool.mutex);
    pool.expected_count = 0;
    expect_weights(m->fuse);
    for (int l = 0; l < m->layer_count; l++) {
        const layer *now = m->layers[l];
        const matrix *products[] = {&now->qkv, &now->value, &now->out, &now->gate_up, &now->down};
        for (size_t i = 0; i < sizeof products / sizeof *products; i++) expect_weights(products[i]);
    }
    expect_weights(&m->head);
    pthread_mutex_unlock(&pool.mutex);
    wake_threads();
}
