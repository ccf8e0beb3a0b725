/* Operations on rows, between the products */
#include "state.h"

void add(float *o, const float *x, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(o + i, load(o + i) + load(x + i));
    for (; i < count; i++) o[i] += x[i];
}

void rms_norm(const float *x, const float *gain, float epsilon, int64_t width, float *o) {
    vf sum = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vf v = load(x + i);
        sum += v * v;
    }
    float squares = total(sum);
    for (; i < width; i++) squares += x[i] * x[i];
    float factor = 1.0f / sqrtf(squares / (float)width + epsilon);
    for (i = 0; i + LANES <= width; i += LANES) store(o + i, load(x + i) * factor * load(gain + i));
    for (; i < width; i++) o[i] = x[i] * factor * gain[i];
}

static void layer_norm(const float *x, const float *gain, float epsilon, int64_t width, float *o) {
    vf sum = {0}, squares = {0};
    int64_t i = 0, whole = width / LANES * LANES;
    for (; i < whole; i += LANES) sum += load(x + i);
    float mean = total(sum);
    for (; i < width; i++) mean += x[i];
    mean /= (float)width;
    for (i = 0; i < whole; i += LANES) {
        vf v = load(x + i) - mean;
        squares += v * v;
    }
    float variance = total(squares);
    for (; i < width; i++) variance += (x[i] - mean) * (x[i] - mean);
    float factor = 1.0f / sqrtf(variance / (float)width + epsilon);
    for (i = 0; i < whole; i += LANES)
        store(o + i, (load(x + i) - mean) * factor * load(gain + i) + load(gain + width + i));
    for (; i < width; i++) o[i] = (x[i] - mean) * factor * gain[i] + gain[width + i];
}

static void norm(const model *m, const float *x, const float *gain, float *o) {
    if (m->centred)
        layer_norm(x, gain, m->epsilon, m->width, o);
    else
        rms_norm(x, gain, m->epsilon, m->width, o);
}

void *quantised_row(const state *s, const matrix *m, int64_t r) {
    return (char *)s->quantised + r * activation_stride(m) * activation_bytes(m->form);
}

void quantise_rows(state *s, const matrix *next, const float *inputs, int64_t input_stride, int first) {
    if (!is_coded(next->form)) return;
    int64_t groups = next->inputs / group_inputs(next);
    for (int r = first; r < s->p->rows; r++)
        quantise_row(next, inputs + r * input_stride, quantised_row(s, next, r), s->x_scales + r * groups,
                     s->x_sums + r * groups);
}

void normalise(state *s, const float *gain, const matrix *next, int first) {
    const model *m = s->p->model;
    for (int r = first; r < s->p->rows; r++)
        norm(m, s->rows + (int64_t)r * m->width, gain, s->input + r * input_width(m));
    quantise_rows(s, next, s->input, input_width(m), first);
}

void embed(state *s) {
    const model *m = s->p->model;
    for (int r = 0; r < s->p->rows; r++) {
        int64_t id = s->p->ids[r], width = m->width;
        float *o = s->rows + r * width;
        for (int64_t i = 0; i < width; i++) o[i] = weight_of(m->embedding ? m->embedding : &m->head, id, i);
        if (m->embedding_scale != 1.0f)
            for (int64_t i = 0; i < width; i++) o[i] *= m->embedding_scale;
        if (m->positions)
            for (int64_t i = 0; i < width; i++) o[i] += weight_of(m->positions, s->p->positions[r], i);
        if (m->channel_scale)
            for (int64_t i = 0; i < width; i++) o[i] *= m->channel_scale[i];
    }
    normalise(s, m->layers[0]->enter, &m->layers[0]->qkv, 0);
}

/* Add the outputs in `qkv`, normalised if there is a gain, to the residual stream. */
void add_outputs(state *s, const float *gain) {
    const model *m = s->p->model;
    for (int r = 0; r < s->p->rows; r++) {
        float *x = s->qkv + (int64_t)r * m->width, *o = s->rows + (int64_t)r * m->width;
        if (gain) norm(m, x, gain, x);
        add(o, x, m->width);
    }
}

void copy_hidden(state *s, int l) {
    const pass *p = s->p;
    if (!p->taps || p->taps[l] < 0) return;
    int64_t count = (int64_t)p->rows * p->model->width;
    memcpy(p->hidden + p->taps[l] * count, s->rows, count * sizeof *s->rows);
}
