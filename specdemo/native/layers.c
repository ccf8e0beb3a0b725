/* Phases of the layers: products of units, each with the operation that follows */
#include "functions.h"
#include "state.h"

#define CHUNK_BYTES (96 << 10)

/* o[rows from first][UNIT] = x times the blocks of unit u; returns their number. */
static int unit_rows(const state *s, const matrix *m, int64_t u, const float *x, int64_t stride, int first, float *o) {
    int64_t b = u * UNIT_BLOCKS, left = block_count(m) - b;
    int rows = s->p->rows - first, blocks = left < UNIT_BLOCKS ? (int)left : UNIT_BLOCKS;
    x += first * stride;
    if (is_coded(m->form)) {
        int64_t groups = first * (m->inputs / group_inputs(m));
        activations a = {quantised_row(s, m, first), s->x_scales + groups, s->x_sums + groups};
        if (m->form == INT8)
            byte_product(m, b, blocks, a, rows, o);
        else
            coded_product(m, b, blocks, a, rows, o);
    } else
        float_product(m, b, blocks, x, stride, rows, o);
    if (m->bias)
        for (int r = 0; r < rows; r++) add(o + r * UNIT, m->bias + b * BLOCK, blocks * BLOCK);
    return blocks;
}

static int columns(const matrix *m, int64_t u) {
    int64_t left = m->outputs - u * UNIT;
    return left < UNIT ? (int)left : UNIT;
}

static void write_unit(const matrix *m, int64_t u, const float *o, int rows, int64_t stride, float *to) {
    for (int r = 0; r < rows; r++) memcpy(to + r * stride + u * UNIT, o + r * UNIT, columns(m, u) * sizeof *o);
}

static void add_unit(const matrix *m, int64_t u, const float *o, int rows, int64_t stride, float *to) {
    for (int r = 0; r < rows; r++) add(to + r * stride + u * UNIT, o + r * UNIT, columns(m, u));
}

INLINE void gate_unit_as(int kind, const state *s, const matrix *m, int64_t u,
                         float *o) { /* activation of gate, times up */
    const model *net = s->p->model;
    int blocks = unit_rows(s, m, u, s->input, input_width(net), 0, o);
    for (int r = 0; r < s->p->rows; r++)
        for (int pair = 0; pair < blocks / 2; pair++) {
            float *gates = o + r * UNIT + 2 * pair * BLOCK, *ups = gates + BLOCK;
            for (int j = 0; j < BLOCK; j += LANES) store(gates + j, activate(kind, load(gates + j)) * load(ups + j));
            int64_t at = (u * UNIT_BLOCKS / 2 + pair) * BLOCK, left = net->inner - at;
            memcpy(s->gated + (int64_t)r * net->inner + at, gates, (left < BLOCK ? left : BLOCK) * sizeof *o);
        }
}

INLINE void up_unit_as(int kind, const state *s, const matrix *m, int64_t u, float *o) {
    int blocks = unit_rows(s, m, u, s->input, input_width(s->p->model), 0, o);
    for (int r = 0; r < s->p->rows; r++)
        for (int j = 0; j < blocks * BLOCK; j += LANES) store(o + r * UNIT + j, activate(kind, load(o + r * UNIT + j)));
    write_unit(m, u, o, s->p->rows, s->p->model->inner, s->gated);
}

static void inner_unit(const state *s, const matrix *m, int64_t u, float *o) {
#define ACTIVATION_CASE(KIND)                                                                                          \
    case KIND:                                                                                                         \
        if (s->p->model->gated)                                                                                        \
            gate_unit_as(KIND, s, m, u, o);                                                                            \
        else                                                                                                           \
            up_unit_as(KIND, s, m, u, o);                                                                              \
        break;
    switch (s->p->model->activation) {
        ACTIVATION_CASE(SILU)
        ACTIVATION_CASE(GELU_TANH)
        ACTIVATION_CASE(GELU_ERF)
    }
}

/* Phases: up to 6 per layer, then the head; a chunk is a range of units (of outputs, or rows of a key head) */

enum stage { QKV, VALUE, ATTEND, OUT, GATE, DOWN, STAGES };

static const matrix *product_of(const model *m, int phase) {
    if (phase / STAGES == m->layer_count) return &m->head;
    const layer *now = m->layers[phase / STAGES];
    const matrix *products[STAGES] = {&now->qkv, &now->value, 0, &now->out, &now->gate_up, &now->down};
    return products[phase % STAGES];
}

static int64_t unit_count(const state *s, int phase) {
    const matrix *product = product_of(s->p->model, phase);
    if (!product) return (int64_t)s->p->rows * s->p->model->kv_heads;
    return (block_count(product) + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
}

static int64_t chunk_units(const state *s, int phase) {
    const matrix *product = product_of(s->p->model, phase);
    int64_t units = unit_count(s, phase), parts = 4 * s->p->threads,
            share = product ? (units + parts - 1) / parts : units / parts;
    int64_t size = product ? 1 + CHUNK_BYTES / (UNIT_BLOCKS * product->inputs * input_bytes(product->form)) : share;
    if (s->p->threads == 1) return units;
    size = size < share ? size : share;
    return size > units / 60000 ? size : units / 60000 + 1; /* the ticket counts 16 bits */
}

int64_t chunk_count(const state *s, int phase) {
    int64_t size = chunk_units(s, phase);
    return (unit_count(s, phase) + size - 1) / size;
}

void run_chunk(state *s, int phase, int64_t chunk, float *buffer) {
    const pass *p = s->p;
    const model *m = p->model;
    const matrix *product = product_of(m, phase);
    int64_t size = chunk_units(s, phase), count = unit_count(s, phase), end = (chunk + 1) * size;
    int64_t stride = input_width(m);
    for (int64_t u = chunk * size; u < (end < count ? end : count) && !is_stopped(s); u++) {
        if (product == &m->head) {
            int blocks = unit_rows(s, product, u, s->input, stride, s->first, buffer);
            for (int r = 0; m->logit_cap && r < p->last; r++) cap(buffer + r * UNIT, blocks * BLOCK, m->logit_cap);
            write_unit(product, u, buffer, p->last, product->outputs, p->logits);
            continue;
        }
        switch (phase % STAGES) {
        case QKV:
            unit_rows(s, product, u, s->input, stride, 0, buffer);
            write_unit(product, u, buffer, p->rows, qkv_width(m), s->qkv);
            break;
        case VALUE:
            unit_rows(s, product, u, s->input, stride, 0, buffer);
            write_unit(product, u, buffer, p->rows, qkv_width(m),
                       s->qkv + ((int64_t)m->heads + m->kv_heads) * m->head_dim);
            break;
        case ATTEND: attend(s, phase / STAGES, (int)(u / m->kv_heads), (int)(u % m->kv_heads), buffer); break;
        case OUT:
            unit_rows(s, product, u, s->input, stride, 0, buffer);
            if (m->parallel || m->layers[phase / STAGES]->after_out)
                write_unit(product, u, buffer, p->rows, m->width, s->qkv);
            else
                add_unit(product, u, buffer, p->rows, m->width, s->rows);
            break;
        case GATE: inner_unit(s, product, u, buffer); break;
        case DOWN:
            unit_rows(s, product, u, s->gated, m->inner, 0, buffer);
            if (m->layers[phase / STAGES]->after_down)
                write_unit(product, u, buffer, p->rows, m->width, s->qkv);
            else
                add_unit(product, u, buffer, p->rows, m->width, s->rows);
        }
    }
}

/* Serial part after a phase. Returns the next phase, or -1 after the last. */
int finish_phase(state *s, int phase) {
    const pass *p = s->p;
    const model *m = p->model;
    int l = phase / STAGES;
    if (is_stopped(s) || l == m->layer_count) return -1;
    const layer *now = m->layers[l];
    switch (phase % STAGES) {
    case QKV:
        if (now->value.weights) {
            quantise_rows(s, &now->value, s->input, input_width(m), 0);
            break;
        }
        phase++; /* fallthrough */
    case VALUE: rotate(s, l); break;
    case ATTEND: quantise_rows(s, &now->out, s->input, input_width(m), 0); break;
    case OUT:
        if (now->after_out) add_outputs(s, now->after_out);
        normalise(s, now->between, &now->gate_up, 0);
        if (m->parallel) add_outputs(s, 0);
        break;
    case GATE: quantise_rows(s, &now->down, s->gated, m->inner, 0); break;
    case DOWN:
        if (now->after_down) add_outputs(s, now->after_down);
        copy_hidden(s, l);
        if (l + 1 < m->layer_count) {
            normalise(s, m->layers[l + 1]->enter, &m->layers[l + 1]->qkv, 0);
            break;
        }
        if (!p->last) return -1;
        normalise(s, m->leave, &m->head, s->first);
    }
    return phase + 1;
}
