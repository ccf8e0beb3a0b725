/* Buffers of a pass */
#include "state.h"

static int64_t qkv_space(const model *m) { return larger_of(qkv_width(m), m->width); }
static int64_t group_count(int64_t width) { return width / 16 + 1; } /* of a row of activations */
static int64_t integer_floats(int64_t width) { return 2 * group_count(width) + width / 2 + 2; }

/* Size of `scratch`, or -1 for an invalid model */
int64_t scratch_floats(const model *m, int32_t rows) {
    if (rows < 1 || check_model(m)) return -1;
    int64_t row = m->width + input_width(m) + inner_width(m) + qkv_space(m) + m->heads * padded_dim(m);
    return rows * (row + integer_floats(input_width(m)) + integer_floats(inner_width(m)) + 2) + 2 * padded_dim(m);
}

static integer_rows lay_out_integers(float *at, int64_t rows, int64_t width) {
    integer_rows r = {.scales = at};
    r.corrections = (correction *)(at + rows * group_count(width));
    r.x = at + 2 * rows * group_count(width);
    return r;
}

state lay_out(const pass *p) {
    const model *m = p->model;
    state s = {.p = p};
    float *next = p->scratch;
    s.rotation_buffer = next, next += 2 * padded_dim(m);
    s.rows = next, next += (int64_t)p->rows * m->width;
    s.input = next, next += (int64_t)p->rows * input_width(m);
    s.gated = next, next += (int64_t)p->rows * inner_width(m);
    s.qkv = next, next += (int64_t)p->rows * qkv_space(m);
    s.query = next, next += (int64_t)p->rows * m->heads * padded_dim(m);
    s.text_of = (int32_t *)next, next += p->rows;
    s.logit_rows = (int32_t *)next, next += p->rows;
    s.input_integers = lay_out_integers(next, p->rows, input_width(m));
    s.gated_integers = lay_out_integers(next + p->rows * integer_floats(input_width(m)), p->rows, inner_width(m));
    for (int t = 0, end = 0; t < p->text_count; t++)
        for (int i = 0, rows = p->texts[t].rows; i < rows; i++, end++) {
            s.text_of[end] = t;
            if (i >= rows - p->texts[t].last) s.logit_rows[s.last++] = end;
        }
    return s;
}

/* Once seen, the flag remains set for the pass: chunks were skipped. */
int is_stopped(state *s) {
    if (s->p->stop && __atomic_load_n(s->p->stop, __ATOMIC_RELAXED)) __atomic_store_n(&s->stopped, 1, __ATOMIC_RELAXED);
    return __atomic_load_n(&s->stopped, __ATOMIC_RELAXED);
}

static int has_final_tap(const pass *p) {
    for (int i = 0; i < p->tap_count; i++)
        if (p->taps[i] == p->model->layer_count) return 1;
    return 0;
}

/* Rows without logits end with the keys and values of the last layer. */
int needs_queries(const state *s, int l) { return l + 1 < s->p->model->layer_count || s->last || has_final_tap(s->p); }
