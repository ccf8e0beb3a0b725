/* Validation of models and passes, before arrays are read or written: all counts are then positive, and products of two
 * sizes fit into 64 bits. Buffers of a pass. */
#include "state.h"

#define MOST_NUMBERS (1 << 26) /* of a row of activations */
#define MOST_LAYERS (1 << 16)
#define MOST_INT8_INPUTS (1 << 17) /* their sums of products fit into 32 bits */

static int in_range(int64_t value, int64_t least, int64_t most) { return value >= least && value <= most; }

static const char *check_matrix(const matrix *m, int64_t outputs, int64_t inputs) {
    if (!in_range(m->form, 0, FORMAT_COUNT - 1)) return "a matrix has an unknown number format";
    if (m->outputs != outputs || m->inputs != inputs) return "the sizes of a matrix differ from those of the model";
    if (!in_range(inputs, 1, MOST_NUMBERS) || outputs < 1) return "a matrix is empty or too large";
    if (inputs % group_inputs(m)) return "the inputs of a matrix are not a multiple of the group of its number format";
    if (m->form == INT8 && inputs > MOST_INT8_INPUTS) return "an 8-bit matrix has too many inputs";
    if (m->form == CODE4 && (!m->codes || !m->code_bytes)) return "a matrix has no codes";
    if (m->byte_inputs && (!is_coded(m->form) || m->form < Q8_0)) return "a matrix cannot have narrow activations";
    if (!m->weights || (FORMATS[m->form].scales && !m->scales)) return "a matrix has no weights or scales";
    return 0;
}

static const char *check_layer(const model *m, const layer *now, int64_t inputs) {
    int64_t queries = (int64_t)m->heads * m->head_dim, keys = (int64_t)m->kv_heads * m->head_dim;
    int64_t pairs = ((int64_t)m->inner + BLOCK - 1) / BLOCK * 2 * BLOCK; /* blocks of gate and up alternate */
    const char *fault = check_matrix(&now->qkv, queries + (now->value.weights ? 1 : 2) * keys, inputs);
    if (!fault && now->value.weights) fault = check_matrix(&now->value, keys, inputs);
    if (!fault) fault = check_matrix(&now->out, m->width, queries);
    if (!fault) fault = check_matrix(&now->gate_up, m->gated ? pairs : m->inner, m->width);
    if (!fault) fault = check_matrix(&now->down, m->width, m->inner);
    if (!fault && (!now->input_norm || !now->mlp_norm)) fault = "a layer has no gains";
    if (!fault && now->window < 0) fault = "the window of a layer is negative";
    return fault;
}

/* A sentence about the first contradiction in a model, or null */
const char *check_model(const model *m) {
    if (!m || !m->layers || !m->final_norm || !in_range(m->layer_count, 1, MOST_LAYERS))
        return "the model has no layers";
    if (!in_range(m->width, 1, MOST_NUMBERS) || !in_range(m->inner, 1, MOST_NUMBERS / 2))
        return "the width of the model is not positive or too large";
    if (!in_range(m->head_dim, 1, MOST_NUMBERS) || m->heads < 1 || m->kv_heads < 1 || m->heads % m->kv_heads)
        return "the heads are not a multiple of the key heads";
    if (padded_dim(m) * ((int64_t)m->heads + 2 * (int64_t)m->kv_heads) > MOST_NUMBERS) return "the heads are too large";
    if (m->rotated % 2 || !in_range(m->rotated, 0, m->head_dim))
        return "the rotated values of a head are not an even number up to its size";
    if (!in_range(m->cache_form, F32, F16)) return "the cache has an unknown number format";
    if (!in_range(m->activation, SILU, GELU_ERF)) return "the activation is unknown";
    const char *fault = check_matrix(&m->head, m->head.outputs, m->width);
    if (!fault && m->embedding) fault = check_matrix(m->embedding, m->embedding->outputs, m->width);
    if (!fault && m->fuse) fault = check_matrix(m->fuse, m->width, m->fuse->inputs);
    if (!fault && m->fuse && (!m->stream_norm || !m->embedding)) fault = "a drafting head has no gains or embeddings";
    if (!fault && m->positions) fault = check_matrix(m->positions, m->positions->outputs, m->width);
    for (int l = 0; !fault && l < m->layer_count; l++)
        fault = m->layers[l] ? check_layer(m, m->layers[l], l ? m->width : entry_width(m)) : "the model has no layers";
    return fault;
}

static const char *check_row(const pass *p, const text *t, int r) {
    const model *m = p->model;
    const matrix *embedding = m->embedding ? m->embedding : &m->head;
    int64_t start = p->extra_start[r], end = p->extra_start[r + 1], written = (int64_t)t->held + t->rows;
    if (!in_range(p->ids[r], 0, (int64_t)embedding->outputs - 1)) return "a token is outside the vocabulary";
    if (!in_range(p->positions[r], 0, (int64_t)p->rotations - 1)) return "a position has no rotation";
    if (m->positions && p->positions[r] >= m->positions->outputs) return "a position is outside the model's positions";
    if (!in_range(p->prefix[r], 0, written) || start < 0 || end < start || p->prefix[r] + end - start < 1)
        return "a row sees positions outside the cache, or none";
    for (int64_t i = start; i < end; i++)
        if (!in_range(p->extra[i], 0, written - 1)) return "a row sees positions outside the cache, or none";
    return 0;
}

static const char *check_text(const pass *p, const text *t, int64_t *rows, int64_t *last) {
    const model *m = p->model;
    int64_t per_position =
        larger_of((int64_t)m->layer_count * 2 * m->kv_heads * padded_dim(m), (int64_t)p->tap_count * m->width);
    const char *fault = 0;
    if (!t->cache) return "the pass has no buffers";
    if (t->rows < 1 || t->held < 0 || (int64_t)t->held + t->rows > t->capacity) return "the rows exceed the cache";
    if (t->capacity % KEY_GROUP) return "the capacity of the cache is not a multiple of a group of keys";
    if (t->capacity > INT64_MAX / per_position / (int64_t)sizeof(float)) return "the cache is too large";
    if (!in_range(t->last, 0, t->rows)) return "more logits than rows are requested";
    if (m->fuse && !t->own_state) return "the pass has no buffers";
    if (m->fuse && !t->target_states != !p->texts->target_states) return "the texts have states of different sources";
    if (m->fuse && !t->target_states && t->rows > 1) return "several rows need states of the target";
    if (*rows + t->rows > p->rows) return "the rows of the texts differ from those of the pass";
    for (int r = 0; !fault && r < t->rows; r++) fault = check_row(p, t, (int)*rows + r);
    *rows += t->rows, *last += t->last;
    return fault;
}

/* A sentence about the first contradiction in a pass and its model, or null */
const char *check_pass(const pass *p) {
    const char *fault = check_model(p->model);
    if (fault) return fault;
    const model *m = p->model;
    int64_t rows = 0, last = 0;
    if (!p->texts || !p->ids || !p->positions || !p->prefix || !p->extra || !p->extra_start || !p->scratch)
        return "the pass has no buffers";
    if ((m->rotated && (!p->cosines || !p->sines)) || (p->tap_count && !p->taps)) return "the pass has no buffers";
    if (p->threads < 1) return "the number of threads is not positive";
    if (p->rows < 1 || p->text_count < 1 || p->tap_count < 0) return "the pass has no rows";
    for (int i = 0; i < p->tap_count; i++)
        if (!in_range(p->taps[i], 0, m->layer_count)) return "a hidden state is of no layer";
    for (int t = 0; !fault && t < p->text_count; t++) fault = check_text(p, p->texts + t, &rows, &last);
    if (!fault && rows != p->rows) fault = "the rows of the texts differ from those of the pass";
    return !fault && last && !p->logits ? "the pass has no buffers" : fault;
}

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
