/* Rotation of queries and keys, and the cache. The keys of a head are [positions / KEY_GROUP][padded head_dim]
 * [KEY_GROUP], so that the scores of adjacent positions need no horizontal sums; its values are [positions][padded
 * head_dim]. */
#include "attention.h"

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
