/* Phases of the layers: products of units, each with the operation that follows */
#include "state.h"

#define CHUNK_BYTES (96 << 10)

/* Blocks of outputs: at most UNIT_BLOCKS from `first` */
typedef struct {
    int64_t first;
    int count;
} range;

/* o[rows][UNIT] = x times the blocks. */
static void range_rows(const state *s, const matrix *m, range b, const float *x, int64_t stride, int rows, float *o) {
    if (is_coded(m->form)) {
        const integer_rows *from = integers_of(s, x);
        activations a = {from->x, from->scales, from->corrections};
        if (m->form == INT8)
            byte_product(m, b.first, b.count, a, rows, o);
        else
            coded_product(m, b.first, b.count, a, rows, o);
    } else
        float_product(m, b.first, b.count, x, stride, rows, o);
    if (m->bias)
        for (int r = 0; r < rows; r++) add(o + r * UNIT, m->bias + b.first * BLOCK, b.count * BLOCK);
}

static int64_t columns(const matrix *m, range b) {
    int64_t left = m->outputs - b.first * BLOCK, whole = b.count * BLOCK;
    return left < whole ? left : whole;
}

static void write_range(const matrix *m, range b, const float *o, int rows, int64_t stride, float *to) {
    to += b.first * BLOCK;
    for (int r = 0; r < rows; r++) memcpy(to + r * stride, o + r * UNIT, columns(m, b) * sizeof *o);
}

static void add_range(const matrix *m, range b, const float *o, int rows, int64_t stride, float *to) {
    for (int r = 0; r < rows; r++) add(to + r * stride + b.first * BLOCK, o + r * UNIT, columns(m, b));
}

INLINE void gate_range_as(int kind, state *s, const matrix *m, range b, float *o) { /* activation of gate, times up */
    const model *net = s->p->model;
    range_rows(s, m, b, s->input, input_width(net), s->p->rows, o);
    for (int r = 0; r < s->p->rows; r++)
        for (int pair = 0; pair < b.count / 2; pair++) {
            float *gates = o + r * UNIT + 2 * pair * BLOCK, *ups = gates + BLOCK;
            for (int j = 0; j < BLOCK; j += LANES) store(gates + j, activate(kind, load(gates + j)) * load(ups + j));
            int64_t at = (b.first / 2 + pair) * BLOCK, left = net->inner - at;
            memcpy(s->gated + (int64_t)r * net->inner + at, gates, (left < BLOCK ? left : BLOCK) * sizeof *o);
        }
}

INLINE void up_range_as(int kind, state *s, const matrix *m, range b, float *o) {
    range_rows(s, m, b, s->input, input_width(s->p->model), s->p->rows, o);
    for (int r = 0; r < s->p->rows; r++)
        for (int j = 0; j < b.count * BLOCK; j += LANES)
            store(o + r * UNIT + j, activate(kind, load(o + r * UNIT + j)));
    write_range(m, b, o, s->p->rows, s->p->model->inner, s->gated);
}

/* Blocks of gate and up, or of up, whose outputs are whole groups of inputs of the next matrix; they alternate. */
static int inner_blocks(const model *m, const layer *now) {
    int blocks = (m->gated ? 2 : 1) * (int)larger_of(1, FORMATS[now->down.form].group / BLOCK);
    return blocks <= UNIT_BLOCKS ? blocks : m->gated ? 2 : 1;
}
static int quantises_units(const model *m, const layer *now) {
    return has_parts(&now->down, inner_blocks(m, now) / (m->gated ? 2 : 1) * BLOCK);
}

static void inner_range(state *s, const layer *now, range b, float *o) {
    const matrix *m = &now->gate_up;
#define ACTIVATION_CASE(KIND)                                                                                          \
    case KIND:                                                                                                         \
        if (s->p->model->gated)                                                                                        \
            gate_range_as(KIND, s, m, b, o);                                                                           \
        else                                                                                                           \
            up_range_as(KIND, s, m, b, o);                                                                             \
        break;
    switch (s->p->model->activation) {
        ACTIVATION_CASE(SILU)
        ACTIVATION_CASE(GELU_TANH)
        ACTIVATION_CASE(GELU_ERF)
    }
    int64_t per_output = s->p->model->gated ? 2 : 1, first = b.first / per_output * BLOCK;
    int64_t end = first + b.count / per_output * BLOCK;
    if (quantises_units(s->p->model, now))
        quantise_part(s, &now->down, first, end < now->down.inputs ? end : now->down.inputs, s->gated,
                      s->p->model->inner, (row_range){0, s->p->rows});
}

/* Phases: FUSE of a drafting head, up to 6 per layer, then the head; a chunk is a range of units (blocks of outputs, or
 * units of attention) */

enum stage { QKV, VALUE, ATTEND, OUT, GATE, DOWN, STAGES };

static const matrix *product_of(const model *m, int phase) {
    if (phase == FUSE) return m->fuse;
    if (phase / STAGES == m->layer_count) return &m->head;
    const layer *now = m->layers[phase / STAGES];
    const matrix *products[STAGES] = {&now->qkv, &now->value, 0, &now->out, &now->gate_up, &now->down};
    return products[phase % STAGES];
}

/* Blocks of a unit: those of a product in large matrices; gate and up alternate. */
static int unit_blocks(const state *s, int phase) {
    if (block_count(product_of(s->p->model, phase)) >= 8 * s->p->threads * UNIT_BLOCKS) return UNIT_BLOCKS;
    int is_inner = phase % STAGES == GATE && phase / STAGES < s->p->model->layer_count;
    return is_inner ? inner_blocks(s->p->model, s->p->model->layers[phase / STAGES]) : 1;
}

static int64_t unit_count(const state *s, int phase) {
    const matrix *product = product_of(s->p->model, phase);
    if (!product) return s->attention_units;
    return (block_count(product) + unit_blocks(s, phase) - 1) / unit_blocks(s, phase);
}

/* Index of a phase in `times` of a pass */
int stage_of(const state *s, int phase) {
    if (phase == FUSE) return QKV;
    return phase / STAGES == s->p->model->layer_count ? STAGES : phase % STAGES;
}

/* Chunks have equal numbers of units, as nearly as possible; those of attention differ in size. */
int64_t chunk_count(const state *s, int phase) {
    const matrix *product = product_of(s->p->model, phase);
    int64_t units = unit_count(s, phase), count = product ? 8 * s->p->threads : units;
    if (s->p->threads == 1) return 1;
    if (product)
        count = larger_of(count, block_count(product) * product->inputs * input_bytes(product->form) / CHUNK_BYTES);
    count = count < units ? count : units;
    return count < 60000 ? count : 60000; /* the ticket counts 16 bits */
}

static void run_product(state *s, int phase, range b, float *buffer) {
    const pass *p = s->p;
    const model *m = p->model;
    const matrix *product = product_of(m, phase);
    int64_t stride = input_width(m);
    if (product == &m->head) {
        range_rows(s, product, b, s->input, stride, s->last, buffer);
        for (int r = 0; m->logit_cap && r < s->last; r++) cap(buffer + r * UNIT, b.count * BLOCK, m->logit_cap);
        write_range(product, b, buffer, s->last, product->outputs, p->logits);
        return;
    }
    if (phase == FUSE) {
        range_rows(s, product, b, s->gated, product->inputs, p->rows, buffer);
        write_range(product, b, buffer, p->rows, m->width, s->rows);
        return;
    }
    const layer *now = m->layers[phase / STAGES];
    switch (phase % STAGES) {
    case QKV:
        if ((b.first + b.count) * BLOCK <= (int64_t)m->heads * m->head_dim && !needs_queries(s, phase / STAGES)) break;
        range_rows(s, product, b, s->input, stride, p->rows, buffer);
        write_range(product, b, buffer, p->rows, qkv_width(m), s->qkv);
        break;
    case VALUE:
        range_rows(s, product, b, s->input, stride, p->rows, buffer);
        write_range(product, b, buffer, p->rows, qkv_width(m),
                    s->qkv + ((int64_t)m->heads + m->kv_heads) * m->head_dim);
        break;
    case OUT:
        range_rows(s, product, b, s->input, stride, p->rows, buffer);
        if (m->parallel || now->post_attention_norm)
            write_range(product, b, buffer, p->rows, m->width, s->qkv);
        else
            add_range(product, b, buffer, p->rows, m->width, s->rows);
        break;
    case GATE: inner_range(s, now, b, buffer); break;
    case DOWN:
        range_rows(s, product, b, s->gated, m->inner, p->rows, buffer);
        if (now->post_mlp_norm)
            write_range(product, b, buffer, p->rows, m->width, s->qkv);
        else
            add_range(product, b, buffer, p->rows, m->width, s->rows);
    }
}

void run_chunk(state *s, int phase, int64_t chunk, float *buffer) {
    const model *m = s->p->model;
    int64_t units = unit_count(s, phase), chunks = chunk_count(s, phase);
    int64_t first = units * chunk / chunks, end = units * (chunk + 1) / chunks;
    if (!product_of(m, phase)) {
        for (int64_t u = first; u < end && !is_stopped(s); u++) attend(s, phase / STAGES, u, buffer);
        return;
    }
    first *= unit_blocks(s, phase), end *= unit_blocks(s, phase);
    end = end < block_count(product_of(m, phase)) ? end : block_count(product_of(m, phase));
    for (range b = {first, 0}; b.first < end && !is_stopped(s); b.first += b.count) {
        b.count = end - b.first < UNIT_BLOCKS ? (int)(end - b.first) : UNIT_BLOCKS;
        run_product(s, phase, b, buffer);
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
    case FUSE: combine(s); break;
    case QKV:
        if (now->value.weights) {
            quantise_rows(s, &now->value, s->input, input_width(m), p->rows);
            break;
        }
        phase++; /* fallthrough */
    case VALUE:
        rotate(s, l);
        if (!needs_queries(s, l)) return -1;
        break;
    case ATTEND:
        if (!has_parts(&now->out, m->heads / m->kv_heads * (int64_t)m->head_dim))
            quantise_rows(s, &now->out, s->input, input_width(m), p->rows);
        break;
    case OUT:
        if (now->post_attention_norm) add_outputs(s, now->post_attention_norm);
        normalise(s, now->mlp_norm, &now->gate_up);
        if (m->parallel) add_outputs(s, 0);
        break;
    case GATE:
        if (!quantises_units(m, now)) quantise_rows(s, &now->down, s->gated, m->inner, p->rows);
        break;
    case DOWN:
        if (now->post_mlp_norm) add_outputs(s, now->post_mlp_norm);
        copy_states(s, l + 1);
        if (l + 1 < m->layer_count) {
            normalise(s, m->layers[l + 1]->input_norm, &m->layers[l + 1]->qkv);
            break;
        }
        if (!s->last) return -1;
        normalise_last(s);
    }
    return phase + 1;
}
