/* Buffers of a pass */
#include "state.h"

static int64_t qkv_space(const model *m) { return larger_of(qkv_width(m), m->width); }
static int64_t widest(const model *m) { return larger_of(input_width(m), inner_width(m)); }
static int64_t group_count(const model *m) { return widest(m) / 16 + 1; } /* of a row of activations */

/* Size of `scratch`, or -1 for an invalid model */
int64_t scratch_floats(const model *m, int32_t rows) {
    if (rows < 1 || check_model(m)) return -1;
    int64_t row = m->width + input_width(m) + inner_width(m) + qkv_space(m) + m->heads * padded_dim(m);
    return rows * (row + 2 * group_count(m) + widest(m) / 2 + 4) + 2 * padded_dim(m);
}

state lay_out(const pass *p) {
    const model *m = p->model;
    state s = {.p = p};
    float *next = p->scratch;
    s.head = next, next += 2 * padded_dim(m);
    s.rows = next, next += (int64_t)p->rows * m->width;
    s.input = next, next += (int64_t)p->rows * input_width(m);
    s.gated = next, next += (int64_t)p->rows * inner_width(m);
    s.qkv = next, next += (int64_t)p->rows * qkv_space(m);
    s.query = next, next += (int64_t)p->rows * m->heads * padded_dim(m);
    s.x_scales = next, next += p->rows * group_count(m);
    s.corrections = (correction *)next, next += p->rows * group_count(m);
    s.text_of = (int32_t *)next, next += p->rows;
    s.head_rows = (int32_t *)next, next += p->rows;
    s.quantised = next;
    for (int t = 0, end = 0; t < p->text_count; t++)
        for (int i = 0, rows = p->texts[t].rows; i < rows; i++, end++) {
            s.text_of[end] = t;
            if (i >= rows - p->texts[t].last) s.head_rows[s.last++] = end;
        }
    return s;
}

/* Once seen, the flag remains set for the pass: chunks were skipped. */
int is_stopped(state *s) {
    if (s->p->stop && __atomic_load_n(s->p->stop, __ATOMIC_RELAXED)) __atomic_store_n(&s->stopped, 1, __ATOMIC_RELAXED);
    return __atomic_load_n(&s->stopped, __ATOMIC_RELAXED);
}
