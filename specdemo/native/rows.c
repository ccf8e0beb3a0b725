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

/* Quantise the inputs from `first` to `end` of rows. */
void quantise_part(state *s, const matrix *next, int64_t first, int64_t end, const float *inputs, int64_t stride,
                   row_range rows) {
    const integer_rows *to = integers_of(s, inputs);
    int64_t groups = next->inputs / group_inputs(next), bytes = activation_stride(next) * activation_bytes(next);
    for (int64_t r = rows.first; r < rows.first + rows.count; r++)
        quantise_inputs(next, first, end, inputs + r * stride, (char *)to->x + r * bytes, to->scales + r * groups,
                        to->corrections + r * groups);
}

void quantise_rows(state *s, const matrix *next, const float *inputs, int64_t stride, int rows) {
    if (is_coded(next->form)) quantise_part(s, next, 0, next->inputs, inputs, stride, (row_range){0, rows});
}

void normalise(state *s, const float *gain, const matrix *next) {
    const model *m = s->p->model;
    for (int r = 0; r < s->p->rows; r++) norm(m, s->rows + (int64_t)r * m->width, gain, s->input + r * input_width(m));
    quantise_rows(s, next, s->input, input_width(m), s->p->rows);
}

/* Input of the head: the rows with logits */
void normalise_last(state *s) {
    const model *m = s->p->model;
    for (int i = 0; i < s->last; i++)
        norm(m, s->rows + (int64_t)s->logit_rows[i] * m->width, m->final_norm, s->input + i * input_width(m));
    quantise_rows(s, &m->head, s->input, input_width(m), s->last);
}

static void embed(const state *s, int r, float *o) {
    const model *m = s->p->model;
    int64_t width = m->width;
    read_row(m->embedding ? m->embedding : &m->head, s->p->ids[r], o);
    for (int64_t i = 0; i < width; i++) o[i] *= m->embedding_scale;
    if (m->positions) {
        read_row(m->positions, s->p->positions[r], s->qkv);
        add(o, s->qkv, width);
    }
    if (m->channel_scale)
        for (int64_t i = 0; i < width; i++) o[i] *= m->channel_scale[i];
}

/* Input of the first layer of a drafting head: embeddings and residual stream */
void combine(state *s) {
    const model *m = s->p->model;
    const layer *first = m->layers[0];
    for (int r = 0; r < s->p->rows; r++) {
        float *o = s->input + r * input_width(m), *second = o + m->width, *stream = s->rows + (int64_t)r * m->width;
        embed(s, r, second);
        norm(m, second, first->input_norm, o);
        norm(m, stream, m->stream_norm, second);
        if (m->norm_before_residual) memcpy(stream, second, m->width * sizeof *o);
    }
    quantise_rows(s, &first->qkv, s->input, input_width(m), s->p->rows);
}

static void enter_head(state *s) {
    const pass *p = s->p;
    const model *m = p->model;
    if (!p->texts->target_states) {
        for (int t = 0; t < p->text_count; t++)
            memcpy(s->rows + (int64_t)t * m->width, p->texts[t].own_state, m->width * sizeof *s->rows);
        combine(s);
        return;
    }
    int64_t inputs = m->fuse->inputs;
    for (int t = 0, r = 0; t < p->text_count; r += p->texts[t++].rows)
        memcpy(s->gated + r * inputs, p->texts[t].target_states, p->texts[t].rows * inputs * sizeof *s->gated);
    quantise_rows(s, m->fuse, s->gated, inputs, p->rows);
    s->first = FUSE;
}

/* Prepare the first phase. */
void prepare_inputs(state *s) {
    const model *m = s->p->model;
    if (m->fuse) {
        enter_head(s);
        return;
    }
    for (int r = 0; r < s->p->rows; r++) embed(s, r, s->rows + (int64_t)r * m->width);
    copy_states(s, 0);
    normalise(s, m->layers[0]->input_norm, &m->layers[0]->qkv);
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

/* Store the residual stream that enters layer `l`, normalised after the last layer. */
void copy_states(state *s, int l) {
    const pass *p = s->p;
    const model *m = p->model;
    for (int t = 0, end = 0; m->fuse && l == m->layer_count && t < p->text_count; t++) {
        end += p->texts[t].rows;
        memcpy(p->texts[t].own_state, s->rows + (int64_t)(end - 1) * m->width, m->width * sizeof *s->rows);
    }
    for (int i = 0; i < p->tap_count; i++)
        for (int t = 0, r = 0; p->taps[i] == l && t < p->text_count; r += p->texts[t++].rows)
            for (int j = 0; p->texts[t].states && j < p->texts[t].rows; j++) {
                const text *to = p->texts + t;
                const float *row = s->rows + (int64_t)(r + j) * m->width;
                float *state_of_row = to->states + ((int64_t)(to->held + j) * p->tap_count + i) * m->width;
                if (l < m->layer_count)
                    memcpy(state_of_row, row, m->width * sizeof *row);
                else
                    norm(m, row, m->final_norm, state_of_row);
            }
}

/* Rotation of queries and keys, and the cache. The keys of a head are [positions / KEY_GROUP][padded head_dim]
 * [KEY_GROUP], so that the scores of adjacent positions need no horizontal sums; its values are [positions][padded
 * head_dim]. */

/* Rotate the query or key x of a row (RoPE, 2104.09864). */
static void rotate_head(const model *m, const float *x, const float *cosines, const float *sines, float *o) {
    int64_t dim = m->head_dim, half = m->rotated / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = load(x + i), b = load(x + i + half), c = load(cosines + i), d = load(sines + i);
        store(o + i, a * c - b * d), store(o + i + half, b * c + a * d);
    }
    for (; i < half; i++) {
        o[i] = x[i] * cosines[i] - x[i + half] * sines[i];
        o[i + half] = x[i + half] * cosines[i] + x[i] * sines[i];
    }
    for (i = 2 * half; i < dim; i++) o[i] = x[i];
}

/* o = x[count] as numbers of 16 bits, rounded to the nearest; halves are limited to their largest number */
static void round_to_16_bits(int form, const float *x, int64_t count, uint16_t *o) {
    for (int64_t i = 0; i < count; i += LANES) {
        vh numbers = form == BF16 ? round_bf16(load(x + i)) : round_f16(load(x + i));
        memcpy(o + i, &numbers, sizeof numbers);
    }
}

static void write_key(int form, const float *x, int64_t dim, const void *numbers, int64_t at, char *keys) {
    for (int64_t d = 0; d < dim; d++)
        if (form == F32)
            ((float *)keys)[at + d * KEY_GROUP] = x[d];
        else
            ((uint16_t *)keys)[at + d * KEY_GROUP] = ((const uint16_t *)numbers)[d];
}

/* Write the keys and values of all rows to the cache, and the queries to a buffer. */
void rotate(state *s, int l) {
    const pass *p = s->p;
    const model *m = p->model;
    const layer *now = m->layers[l];
    int64_t dim = m->head_dim, padded = padded_dim(m);
    int64_t begin = needs_queries(s, l) ? 0 : m->heads; /* first head */
    float *head = s->rotation_buffer, *rotated = head + padded;
    memset(rotated, 0, padded * sizeof *rotated);
    for (int r = 0, first = 0; r < p->rows; r++) {
        if (r && s->text_of[r] != s->text_of[r - 1]) first = r;
        const text *t = p->texts + s->text_of[r];
        const float *x = s->qkv + r * qkv_width(m) + begin * dim;
        int64_t half = m->rotated / 2, slot = t->held + r - first;
        const float *cosines = p->cosines + p->positions[r] * half, *sines = p->sines + p->positions[r] * half;
        for (int64_t h = begin; h < m->heads + m->kv_heads; h++, x += dim) {
            const float *gain = h < m->heads ? now->query_norm : now->key_norm;
            if (gain) rms_norm(x, gain, m->epsilon, dim, head);
            rotate_head(m, gain ? head : x, cosines, sines, rotated);
            if (h < m->heads) {
                int64_t heads = m->heads / m->kv_heads;
                float *q = s->query + ((h / heads * p->rows + r) * heads + h % heads) * padded;
                for (int64_t i = 0; i < padded; i += LANES) store(q + i, load(rotated + i) * now->attention_scale);
                continue;
            }
            char *keys = cached_head(t, m, l, h - m->heads);
            int64_t at = slot / KEY_GROUP * KEY_GROUP * padded + slot % KEY_GROUP;
            if (m->cache_form != F32) round_to_16_bits(m->cache_form, rotated, padded, (uint16_t *)head);
            write_key(m->cache_form, rotated, dim, head, at, keys);
        }
        for (int64_t h = 0; h < m->kv_heads; h++, x += dim) {
            char *values = cached_head(t, m, l, m->kv_heads + h) + slot * padded * number_bytes(m->cache_form);
            memcpy(rotated, x, dim * sizeof *x);
            if (m->cache_form == F32)
                memcpy(values, rotated, padded * sizeof *rotated);
            else
                round_to_16_bits(m->cache_form, rotated, padded, (uint16_t *)values);
        }
    }
}
