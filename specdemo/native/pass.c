/* Forward pass of a decoder on a CPU: one call per pass, any number of rows.
 *
 * Batch invariance: every output of a row is computed by the same operations in the same order for any number of rows
 * and threads. Matrices are stored in blocks of outputs, [n / BLOCK][k][BLOCK]; each sum is accumulated over k in
 * ascending order. Attention adds sections of the visible positions of a row, see attention.c.
 */
#include "state.h"

/* Compute the logits of the last rows of each text. Returns a `result`; only DONE means that they are complete. */
int run_pass(const pass *requested) {
    if (check_pass(requested)) return INVALID;
    pass limited = *requested, *p = &limited;
    p->threads = p->threads < MAX_THREADS ? p->threads : MAX_THREADS;
    state s = lay_out(p);
    prepare_inputs(&s);
    int64_t floats = larger_of(attention_floats(p->model), (int64_t)p->rows * UNIT);
    if (!run_phases(&s, p->threads, floats)) return NO_MEMORY;
    return s.stopped ? STOPPED : DONE;
}

static int is_valid(const pass *first, const chain *c) {
    const text *t = first->texts;
    if (check_model(first->model) || !t || first->text_count != 1 || t->last != 1) return 0;
    if (!first->positions || !first->prefix || !first->extra_start || first->rows != t->rows) return 0;
    if (t->held < 0 || (int64_t)t->held + t->rows > t->capacity) return 0;
    if (!c->tokens || !c->max_logits || !c->token_probs || !c->min_path_prob) return 0;
    if (c->count < 1 || c->vocab < 1 || c->vocab > first->model->head.outputs) return 0;
    return !(c->sampling.temperature > 0) || (c->uniforms && c->probs && c->scratch);
}

/* Describe rows that continue the cache of a text, and see all positions up to their own. */
static void describe_rows(const pass *p) {
    for (int32_t r = 0, held = p->texts->held; r < p->rows; r++) {
        p->positions[r] = held + r, p->prefix[r] = held + r + 1;
        p->extra_start[r] = p->extra_start[r + 1] = 0;
    }
}

/* Sample a token from its logits. Returns 0 if the chain ends before it. */
static int draw(const float *logits, const chain *c, int i, double *path_prob) {
    int32_t *token = c->tokens + i;
    largest_logits(logits, 1, c->vocab, c->vocab, token, c->max_logits + i);
    if (c->min_path_prob[i] > 0) {
        *path_prob *= largest_probability(logits, c->vocab, c->max_logits[i]);
        if (*path_prob < c->min_path_prob[i]) return 0;
    }
    if (c->sampling.temperature > 0) {
        float *probs = c->probs + i * c->vocab;
        distribution(logits, c->vocab, *token, &c->sampling, probs, c->scratch);
        *token = (int32_t)invert(probs, c->vocab, c->uniforms[i]);
        c->token_probs[i] = probs[*token];
    }
    if (c->ids) *token = c->ids[*token];
    return 1;
}

/* Sample a chain after the rows of `first`, whose visible positions are set here; the last row has logits. Returns a
 * `result`. */
int draft_chain(const pass *first, chain *c) {
    if (!is_valid(first, c)) return INVALID;
    pass p = *first;
    text t = *first->texts;
    double path_prob = 1; /* product of the largest probabilities */
    p.texts = &t;
    for (c->drafted = c->passes = 0; c->drafted < c->count; c->drafted++) {
        describe_rows(&p);
        int result = run_pass(&p);
        if (result != DONE) return result;
        c->passes++;
        if (!draw(p.logits, c, c->drafted, &path_prob)) break;
        if (c->drafted + 1 < c->count && path_prob * path_prob < c->min_path_prob[c->drafted + 1]) {
            c->drafted++;
            break;
        }
        t.held += t.rows;
        t.target_states = 0;
        p.rows = t.rows = 1, p.ids = c->tokens + c->drafted;
    }
    return DONE;
}

/* Digest of the headers that Python reads, see interface.py */
int64_t interface_digest(void) { return INTERFACE_DIGEST; }

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
