/* Forward pass of a decoder on a CPU: one call per pass, any number of rows.
 *
 * Batch invariance: every output of a row is computed by the same operations in the same order for any number of rows
 * and threads. Matrices are stored in blocks of outputs, [n / BLOCK][k][BLOCK]; each sum is accumulated over k in
 * ascending order. Attention visits the visible keys of a row in the order of the text.
 */
#include "sampling.h"
#include "thread_pool.h"

/* Compute the logits of the last `last` rows. Returns a `result`; only DONE means that the logits are complete. */
int run_pass(const pass *requested) {
    if (check_pass(requested)) return INVALID;
    pass limited = *requested, *p = &limited;
    p->threads = p->threads < MAX_THREADS ? p->threads : MAX_THREADS;
    state s = lay_out(p);
    embed(&s);
    if (!run_phases(&s, p->threads, larger_of(attention_floats(p), (int64_t)p->rows * UNIT))) return NO_MEMORY;
    return s.stopped ? STOPPED : DONE;
}

static int is_valid(const pass *first, const chain *c) {
    if (check_pass(first) || first->last != 1 || !c->tokens || !c->peaks || !c->chosen) return 0;
    if (c->count < 1 || c->vocab < 1 || c->vocab > first->model->head.outputs) return 0;
    return !(c->temperature > 0) || (c->uniforms && c->probs && c->scratch);
}

/* Sample a chain; `first` has one row of logits. Returns a `result`. */
int draft_chain(const pass *first, const chain *c) {
    if (!is_valid(first, c)) return INVALID;
    pass p = *first;
    int32_t position, prefix, starts[2] = {0, 0};
    for (int i = 0; i < c->count; i++) {
        int result = run_pass(&p);
        if (result != DONE) return result;
        largest_logits(p.logits, 1, c->vocab, c->vocab, c->tokens + i, c->peaks + i);
        if (c->temperature > 0) {
            float *probs = c->probs + i * c->vocab;
            distributions(p.logits, 1, c->vocab, c->vocab, c->temperature, c->top_k, c->top_p, probs, c->scratch);
            c->tokens[i] = (int32_t)invert(probs, c->vocab, c->uniforms[i]);
            c->chosen[i] = probs[c->tokens[i]];
        }
        position = p.held += p.rows, prefix = position + 1;
        p.rows = 1, p.ids = c->tokens + i, p.positions = &position, p.prefix = &prefix, p.extra_start = starts;
    }
    return DONE;
}

/* Layout for the caller: outputs per block and vector */
int block_outputs(void) { return BLOCK; }
int vector_outputs(void) { return LANES; }

/* Extensions of the processor that the code uses */
const char *vector_extensions(void) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return "avx512 vnni";
#elif LANES == 16
    return "avx512";
#elif LANES == 8 && defined(__AVXVNNI__)
    return "avx2 avx-vnni";
#elif LANES == 8 && defined(__AVX2__)
    return "avx2";
#elif defined(__aarch64__)
    return "neon";
#elif defined(__x86_64__)
    return "sse";
#else
    return "";
#endif
}
