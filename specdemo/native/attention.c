/* Rotation of queries and keys, and attention of a row for the query heads of one key head */
#include "functions.h"
#include "state.h"

#define SHARED_KEYS 32
#define HEAD_TILE (SUMS / 4) /* query heads whose sums fit into registers */

/* Rotate queries and keys (RoPE, 2104.09864); write keys and values to the cache. */
void rotate(state *s, int l) {
    const pass *p = s->p;
    const model *m = p->model;
    const layer *now = m->layers[l];
    int64_t dim = m->head_dim, half = m->rotated / 2, padded = padded_dim(m);
    float *head = s->head, *turned = s->head + padded;
    memset(turned, 0, padded * sizeof *turned);
    for (int r = 0; r < p->rows; r++) {
        const float *cosines = p->cosines + p->positions[r] * half, *sines = p->sines + p->positions[r] * half;
        for (int64_t h = 0; h < m->heads + 2 * (int64_t)m->kv_heads; h++) {
            const float *x = s->qkv + r * qkv_width(m) + h * dim;
            int is_query = h < m->heads, is_value = h >= m->heads + m->kv_heads;
            const float *gain = is_query ? now->query_norm : is_value ? 0 : now->key_norm;
            if (gain) {
                rms_norm(x, gain, m->epsilon, dim, head);
                x = head;
            }
            if (is_value)
                memcpy(turned, x, dim * sizeof *x);
            else {
                int64_t i = 0;
                for (; i + LANES <= half; i += LANES) {
                    vf a = load(x + i), b = load(x + i + half), c = load(cosines + i), d = load(sines + i);
                    store(turned + i, a * c - b * d), store(turned + i + half, b * c + a * d);
                }
                for (; i < half; i++) {
                    turned[i] = x[i] * cosines[i] - x[i + half] * sines[i];
                    turned[i + half] = x[i + half] * cosines[i] + x[i] * sines[i];
                }
                for (i = 2 * half; i < dim; i++) turned[i] = x[i];
            }
            if (is_query) {
                float *q = s->query + (r * m->heads + h) * padded;
                for (int64_t i = 0; i < padded; i += LANES) store(q + i, load(turned + i) * now->attention_scale);
                continue;
            }
            int64_t at = (((int64_t)l * 2 * m->kv_heads + h - m->heads) * p->capacity + p->held + r) * padded;
            if (m->cache_form == F32)
                memcpy((float *)p->cache + at, turned, padded * sizeof *turned);
            else
                for (int64_t i = 0; i < padded; i += LANES) {
                    vu u = (vu)load(turned + i);
                    vh h = __builtin_convertvector((u + 0x7fff + (u >> 16 & 1)) >> 16, vh);
                    memcpy((uint16_t *)p->cache + at + i, &h, sizeof h);
                }
        }
    }
}

/* Store the sums of the lanes of four vectors. */
INLINE void store_totals(const vf v[4], float *to) {
#if defined(__AVX__) && LANES == 8
    __m256 halves =
        _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[0], (__m256)v[1]), _mm256_hadd_ps((__m256)v[2], (__m256)v[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#elif defined(__aarch64__)
    float32x4_t low = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]),
                high = vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]);
    vst1q_f32(to, vpaddq_f32(low, high));
#else
    for (int i = 0; i < 4; i++) to[i] = total(v[i]);
#endif
}

/* A row and a key head: visible positions, in the order of the text */
typedef struct {
    const void *keys, *values;
    const int32_t *far;
    int64_t near, count, padded, skipped; /* keys and values start after `skipped` positions */
} view;

INLINE int64_t offset(const view *w, int64_t j) {
    return (j < w->near ? j : w->far[j - w->near] - w->skipped) * w->padded;
}
INLINE view within(int64_t window, int64_t position_bytes, view w) {
    w.skipped = window && w.count > window ? w.count - window : 0;
    int64_t near = w.near < w.skipped ? w.near : w.skipped;
    w.keys = (const char *)w.keys + w.skipped * position_bytes,
    w.values = (const char *)w.values + w.skipped * position_bytes;
    w.near -= near, w.far += w.skipped - near, w.count -= w.skipped;
    return w;
}

/* scores[heads][stride] of the keys from `start` to `end`, a multiple of 4 positions */
INLINE void score_keys(int form, int heads, const view *w, int64_t start, int64_t end, const float *q, float *scores,
                       int64_t stride) {
    for (int64_t j = start; j < end; j += 4) {
        int64_t at[4];
        vf sum[HEAD_TILE][4];
        for (int i = 0; i < 4; i++) at[i] = offset(w, j + i < w->count ? j + i : j);
#pragma GCC unroll 8
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) sum[h][i] = (vf){0};
        for (int64_t d = 0; d < w->padded; d += LANES) {
            vf query[HEAD_TILE];
#pragma GCC unroll 8
            for (int h = 0; h < heads; h++) {
                query[h] = load(q + h * w->padded + d);
                HOLD(query[h]);
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                vf key = load_as(form, w->keys, at[i] + d);
                HOLD(key);
#pragma GCC unroll 8
                for (int h = 0; h < heads; h++) sum[h][i] += query[h] * key;
            }
        }
        for (int h = 0; h < heads; h++) store_totals(sum[h], scores + h * stride + j);
    }
}

/* Replace scores by weights; returns their sum. */
INLINE float exponentials(float *scores, int64_t count) {
    int64_t whole = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = count; j < whole; j++) scores[j] = -INFINITY;
    vf peak = load(scores), sum = {0};
    for (int64_t j = LANES; j < whole; j += LANES) peak = larger(load(scores + j), peak);
    float most = largest(peak);
    for (int64_t j = 0; j < whole; j += LANES) {
        vf weights = exponential(load(scores + j) - most);
        store(scores + j, weights);
        sum += weights;
    }
    return total(sum);
}

/* o[heads][padded] = o + weights[heads][stride] times the values from `start` to `end` */
INLINE void mix_vectors(int form, int heads, int vectors, const view *w, int64_t start, int64_t end,
                        const float *weights, int64_t stride, int64_t d, float *o) {
    vf mixed[HEAD_TILE][4];
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) mixed[h][v] = load(o + h * w->padded + d + v * LANES);
    for (int64_t j = start; j < end; j++) {
        int64_t at = offset(w, j) + d;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vf value = load_as(form, w->values, at + v * LANES);
            HOLD(value);
#pragma GCC unroll 8
            for (int h = 0; h < heads; h++) mixed[h][v] += weights[h * stride + j] * value;
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(o + h * w->padded + d + v * LANES, mixed[h][v]);
}
INLINE void mix_values(int form, int heads, const view *w, int64_t start, int64_t end, const float *weights,
                       int64_t stride, float *o) {
    int64_t d = 0;
    for (; d + 4 * LANES <= w->padded; d += 4 * LANES)
        mix_vectors(form, heads, 4, w, start, end, weights, stride, d, o);
    for (; d < w->padded; d += LANES) mix_vectors(form, heads, 1, w, start, end, weights, stride, d, o);
}

/* Heads of a group share SHARED_KEYS keys in the first cache, and heads of a tile share them in registers. */
#define FOR_TILES(CALL)                                                                                                \
    for (int64_t start = 0, end; start < w.count; start = end) {                                                       \
        end = start + SHARED_KEYS < w.count ? start + SHARED_KEYS : w.count;                                           \
        for (int64_t h = 0, part = 0, n; h < heads; h += n, part++)                                                    \
            switch (n = (heads - h + tiles - part - 1) / (tiles - part)) { TILE_CASES(CALL) }                          \
    }
#define TILE_CASE(COUNT, CALL)                                                                                         \
    case COUNT: {                                                                                                      \
        enum { N = COUNT };                                                                                            \
        CALL;                                                                                                          \
        break;                                                                                                         \
    }
#if HEAD_TILE > 3
#define TILE_CASES(CALL)                                                                                               \
    TILE_CASE(1, CALL)                                                                                                 \
    TILE_CASE(2, CALL)                                                                                                 \
    TILE_CASE(3, CALL)                                                                                                 \
    TILE_CASE(4, CALL)                                                                                                 \
    TILE_CASE(5, CALL)                                                                                                 \
    TILE_CASE(6, CALL)
#else
#define TILE_CASES(CALL)                                                                                               \
    TILE_CASE(1, CALL)                                                                                                 \
    TILE_CASE(2, CALL)                                                                                                 \
    TILE_CASE(3, CALL)
#endif

INLINE void attend_as(int form, state *s, int l, int r, int kv, float *buffer) {
    const pass *p = s->p;
    const model *m = p->model;
    int64_t padded = padded_dim(m), size = form == F32 ? 4 : 2, heads = m->heads / m->kv_heads,
            tiles = (heads + HEAD_TILE - 1) / HEAD_TILE;
    const char *keys = p->cache + ((int64_t)l * 2 * m->kv_heads + kv) * p->capacity * padded * size;
    view w = within(m->layers[l]->window, padded * size,
                    (view){keys, keys + m->kv_heads * p->capacity * padded * size, p->extra + p->extra_start[r],
                           p->prefix[r], p->prefix[r] + p->extra_start[r + 1] - p->extra_start[r], padded, 0});
    int64_t stride = (w.count + LANES - 1) / LANES * LANES;
    float *scores = buffer, *mixed = scores + heads * stride, *sums = mixed + heads * padded;
    const float *q = s->query + (r * m->heads + kv * heads) * padded;
    memset(mixed, 0, heads * padded * sizeof *mixed);
    FOR_TILES(score_keys(form, N, &w, start, end, q + h * padded, scores + h * stride, stride))
    if (m->attention_cap) cap(scores, heads * stride, m->attention_cap);
    for (int64_t h = 0; h < heads; h++) sums[h] = exponentials(scores + h * stride, w.count);
    FOR_TILES(mix_values(form, N, &w, start, end, scores + h * stride, stride, mixed + h * padded))
    for (int64_t h = 0; h < heads; h++) {
        float *o = s->input + r * input_width(m) + (kv * heads + h) * m->head_dim, scale = 1.0f / sums[h];
        int64_t d = 0;
        for (; d + LANES <= m->head_dim; d += LANES) store(o + d, load(mixed + h * padded + d) * scale);
        for (; d < m->head_dim; d++) o[d] = mixed[h * padded + d] * scale;
    }
}

void attend(state *s, int l, int r, int kv, float *buffer) {
    if (s->p->model->cache_form == F32)
        attend_as(F32, s, l, r, kv, buffer);
    else
        attend_as(BF16, s, l, r, kv, buffer);
}

/* Numbers in the buffer of a thread */
int64_t attention_floats(const pass *p) {
    int64_t keys = 0;
    for (int r = 0; r < p->rows; r++)
        keys = larger_of(keys, (int64_t)p->prefix[r] + p->extra_start[r + 1] - p->extra_start[r]);
    return p->model->heads / p->model->kv_heads * (keys + LANES + padded_dim(p->model) + 1);
}
