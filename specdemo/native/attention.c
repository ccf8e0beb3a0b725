/* Attention in blocks of positions (2205.14135).
 *
 * The visible positions of a row, in the order of the text, are divided into sections with fixed bounds, and sections
 * into spans. The spans of a section are accumulated in ascending order, then the sections are added in ascending
 * order. A row has the same bits whether its sections are computed by one thread or by several, alone or in a group of
 * rows that read keys and values once. */
#include "attention.h"

#define HEAD_TILE (SUMS / 4) /* queries whose sums fit into registers */
#define WIDE 4               /* vectors of a tile */

INLINE int64_t far_slot(const visible *row, int64_t position) { return row->far[position - row->near]; }
INLINE int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }

/* Call with N = number of queries of a tile, for all tiles */
#define TILE_CASE(COUNT, CALL)                                                                                         \
    case COUNT: {                                                                                                      \
        enum { N = COUNT };                                                                                            \
        CALL;                                                                                                          \
        break;                                                                                                         \
    }
#if SUMS == 24
#define WIDER_TILES(CALL)                                                                                              \
    TILE_CASE(4, CALL)                                                                                                 \
    TILE_CASE(5, CALL)                                                                                                 \
    TILE_CASE(6, CALL)
#else
#define WIDER_TILES(CALL)
#endif
#define FOR_TILES(QUERIES, CALL)                                                                                       \
    for (int64_t tiles = ((QUERIES) + HEAD_TILE - 1) / HEAD_TILE, tile = 0, i = 0, n; tile < tiles; tile++, i += n)    \
        switch (n = ((QUERIES) - i + tiles - tile - 1) / (tiles - tile)) {                                             \
            TILE_CASE(1, CALL)                                                                                         \
            TILE_CASE(2, CALL)                                                                                         \
            TILE_CASE(3, CALL)                                                                                         \
            WIDER_TILES(CALL)                                                                                          \
        }

/* Numbers from `first` on, with a prefetch one span ahead, where keys or values are read once */
INLINE vf load_ahead(int form, const group *g, const char *numbers, int64_t first) {
    const char *at = numbers + first * number_bytes(form);
    if (form != F32 && (uintptr_t)at % 64 < LANES * number_bytes(form))
        __builtin_prefetch(at + SPAN * g->padded * number_bytes(form));
    return load_as(form, at, 0);
}

/* scores[queries][SPAN] of the positions of `vectors` vectors of keys */
INLINE void score_tile(int form, int queries, int vectors, const group *g, const char *keys, int64_t first,
                       const float *q, float *scores) {
    vf sum[HEAD_TILE][WIDE];
#pragma GCC unroll 8
    for (int n = 0; n < queries; n++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[n][v] = (vf){0};
    for (int64_t d = 0; d < g->dim; d++) {
        vf key[WIDE];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            int at = v * LANES;
            int64_t number = first + at / KEY_GROUP * KEY_GROUP * g->padded + at % KEY_GROUP + d * KEY_GROUP;
            key[v] = load_ahead(form, g, keys, number);
            HOLD(key[v]);
        }
#pragma GCC unroll 8
        for (int n = 0; n < queries; n++) {
            vf x = fill(q[n * g->padded + d]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[n][v] += x * key[v];
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < queries; n++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(scores + n * SPAN + v * LANES, sum[n][v]);
}

/* scores[queries][SPAN] of the first `count` positions of keys, rounded up to groups */
INLINE void score_keys(int form, const group *g, const char *keys, int64_t count, const float *q, int64_t queries,
                       float *scores) {
    const int64_t wide = WIDE * LANES;
    for (int64_t j = 0; j < count;)
        if (wide > KEY_GROUP && count - j > wide - KEY_GROUP) {
            FOR_TILES(queries,
                      score_tile(form, N, WIDE, g, keys, j * g->padded, q + i * g->padded, scores + i * SPAN + j))
            j += wide;
        } else {
            FOR_TILES(queries, score_tile(form, N, KEY_GROUP / LANES, g, keys, j * g->padded, q + i * g->padded,
                                          scores + i * SPAN + j))
            j += KEY_GROUP;
        }
}

static __attribute__((noinline)) void score_floats(const group *g, const float *keys, int64_t count, const float *q,
                                                   int64_t queries, float *scores) {
    score_keys(F32, g, (const char *)keys, count, q, queries, scores);
}

/* o[queries] = o + weights[queries][SPAN] times the values of positions `start` to `end` */
INLINE void mix_tile(int form, int queries, int vectors, const group *g, const char *values, int64_t d, int64_t start,
                     int64_t end, const float *weights, float *o) {
    const int64_t stride = g->padded + NUMBERS;
    vf mixed[HEAD_TILE][WIDE];
#pragma GCC unroll 8
    for (int n = 0; n < queries; n++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) mixed[n][v] = load(o + n * stride + v * LANES);
    for (int64_t j = start; j < end; j++) {
        vf value[WIDE];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            value[v] = load_ahead(form, g, values, j * g->padded + d + v * LANES);
            HOLD(value[v]);
        }
#pragma GCC unroll 8
        for (int n = 0; n < queries; n++) {
            vf weight = fill(weights[n * SPAN + j]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) mixed[n][v] += weight * value[v];
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < queries; n++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(o + n * stride + v * LANES, mixed[n][v]);
}

INLINE void mix_values(int form, const group *g, const char *values, int64_t start, int64_t end, int64_t first,
                       int64_t queries) {
    const float *weights = g->scores + first * SPAN;
    float *o = g->o + first * (g->padded + NUMBERS);
    const int64_t stride = g->padded + NUMBERS;
    int64_t d = 0;
    if (start >= end) return;
    for (; d + WIDE * LANES <= g->padded; d += WIDE * LANES)
        FOR_TILES(queries, mix_tile(form, N, WIDE, g, values, d, start, end, weights + i * SPAN, o + i * stride + d))
    for (; d < g->padded; d += LANES)
        FOR_TILES(queries, mix_tile(form, N, 1, g, values, d, start, end, weights + i * SPAN, o + i * stride + d))
}

static __attribute__((noinline)) void mix_floats(const group *g, const float *values, int64_t start, int64_t end,
                                                 int64_t first, int64_t queries) {
    mix_values(F32, g, (const char *)values, start, end, first, queries);
}

/* Copy numbers of the cache as floats; those of the next span are prefetched. */
INLINE void widen(int form, const char *numbers, int64_t first, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += LANES) {
        if (i * number_bytes(form) % 64 == 0) prefetch(numbers + (first + i) * number_bytes(form), 64);
        store(to + i, load_as(form, numbers, first + i));
    }
}

/* The same without a copy if they are floats already */
INLINE const float *widened(int form, const char *numbers, int64_t first, int64_t count, float *to) {
    if (form == F32) return (const float *)numbers + first;
    widen(form, numbers, first, count, to);
    return to;
}

INLINE vf lanes_between(vf x, vf other, int64_t j, int64_t from, int64_t to) {
    vi index = {0};
    for (int i = 0; i < LANES; i++) index[i] = i;
    return choose((index >= (int32_t)(from - j)) & (index < (int32_t)(to - j)), x, other);
}

/* Replace scores `from` to `to` of a query by weights, relative to the largest score of the section so far. */
static void weigh(const group *g, int64_t query, int64_t from, int64_t to) {
    if (from >= to) return;
    float *w = g->scores + query * SPAN, *o = g->o + query * (g->padded + NUMBERS), *peak = o + g->padded + 1;
    int64_t low = from / LANES * LANES, high = (to + LANES - 1) / LANES * LANES;
    if (g->cap) cap(w + low, high - low, g->cap);
    vf most = fill(-INFINITY), sum = load(g->sums + query * LANES);
    for (int64_t j = low; j < high; j += LANES) {
        if (j < from || j + LANES > to) store(w + j, lanes_between(load(w + j), fill(-INFINITY), j, from, to));
        most = larger(load(w + j), most);
    }
    float next = largest(most);
    if (next > *peak) {
        float factor = exponential(fill(*peak - next))[0];
        for (int64_t d = 0; d < g->padded; d += LANES) store(o + d, load(o + d) * factor);
        sum *= factor, *peak = next;
    }
    for (int64_t j = low; j < high; j += LANES) {
        vf weights = exponential(load(w + j) - *peak);
        if (j < from || j + LANES > to) weights = lanes_between(weights, (vf){0}, j, from, to);
        store(w + j, weights);
        sum += weights;
    }
    store(g->sums + query * LANES, sum);
}

/* Positions of a span, relative to its first, that a row sees: those from `from` to `near` are adjacent in the cache,
 * those from `near` to `to` are listed in `far`. */
typedef struct {
    int64_t from, near, to;
} range;

static range range_of(const visible *row, int64_t p, int64_t end) {
    int64_t from = clamp(row->skipped - p, end - p), near = clamp(row->near - p, end - p);
    return (range){from, near > from ? near : from, clamp(row->count - p, end - p)};
}

INLINE void score_far(int form, const group *g, int64_t r, range seen, int64_t p) {
    int64_t last = -1;
    for (int64_t j = seen.near; j < seen.to; j++) {
        int64_t slot = far_slot(g->rows + r, p + j), start = slot / KEY_GROUP * KEY_GROUP;
        if (start != last) {
            const float *keys = widened(form, g->keys, start * g->padded, KEY_GROUP * g->padded, g->key_tile);
            score_floats(g, keys, KEY_GROUP, g->q + r * g->heads * g->padded, g->heads, g->far_scores);
            last = start;
        }
        for (int64_t h = 0; h < g->heads; h++)
            g->scores[(r * g->heads + h) * SPAN + j] = g->far_scores[h * SPAN + slot % KEY_GROUP];
    }
}

INLINE void mix_far(int form, const group *g, int64_t r, range seen, int64_t p) {
    for (int64_t j = seen.near; j < seen.to; j++)
        widen(form, g->values, far_slot(g->rows + r, p + j) * g->padded, g->padded, g->value_tile + j * g->padded);
    mix_floats(g, g->value_tile, seen.near, seen.to, r * g->heads, g->heads);
}

/* Add the positions from p to `end`, at most SPAN, to the results of a section. */
INLINE void attend_span(int form, const group *g, int64_t p, int64_t end) {
    range seen[GROUP_QUERIES];
    int once = g->row_count == 1 && g->queries <= HEAD_TILE; /* numbers are converted where they are used */
    int64_t near = 0, first = 0, last = SPAN;                /* all rows see the positions from `first` to `last` */
    for (int64_t r = 0; r < g->row_count; r++) {
        seen[r] = range_of(g->rows + r, p, end);
        if (seen[r].near > seen[r].from) near = larger_of(near, seen[r].near);
        first = larger_of(first, seen[r].from), last = seen[r].near < last ? seen[r].near : last;
    }
    if (first >= last) first = last = SPAN;
    const char *stored = g->keys + p * g->padded * number_bytes(form);
    if (near && once) {
        score_keys(form, g, stored, near, g->q, g->queries, g->scores);
    } else if (near) {
        int64_t whole = (near + KEY_GROUP - 1) / KEY_GROUP * KEY_GROUP;
        score_floats(g, widened(form, stored, 0, whole * g->padded, g->key_tile), near, g->q, g->queries, g->scores);
    }
    for (int64_t r = 0; r < g->row_count; r++) {
        score_far(form, g, r, seen[r], p);
        for (int64_t h = 0; h < g->heads; h++) weigh(g, r * g->heads + h, seen[r].from, seen[r].to);
    }
    stored = g->values + p * g->padded * number_bytes(form);
    if (once) {
        mix_values(form, g, stored, seen->from, seen->near, 0, g->queries);
    } else {
        const float *values = near ? widened(form, stored, 0, near * g->padded, g->value_tile) : 0;
        for (int64_t r = 0; r < g->row_count; r++)
            mix_floats(g, values, seen[r].from, seen[r].near < first ? seen[r].near : first, r * g->heads, g->heads);
        mix_floats(g, values, first, last, 0, g->queries);
        for (int64_t r = 0; r < g->row_count; r++)
            mix_floats(g, values, larger_of(seen[r].from, last), seen[r].near, r * g->heads, g->heads);
    }
    for (int64_t r = 0; r < g->row_count; r++) mix_far(form, g, r, seen[r], p);
}

void clear_results(const group *g, float *o) {
    for (int64_t i = 0; i < g->queries; i++, o += g->padded + NUMBERS) {
        memset(o, 0, (g->padded + 1) * sizeof *o);
        o[g->padded + 1] = -INFINITY;
    }
}

/* Compute weighted values, their sum of weights and the largest score of positions `begin` to `end` in g->o. */
INLINE void attend_section_as(int form, const group *g, int64_t begin, int64_t end) {
    memset(g->sums, 0, g->queries * LANES * sizeof *g->sums);
    clear_results(g, g->o);
    for (int64_t p = begin; p < end; p += SPAN) attend_span(form, g, p, end - p < SPAN ? end : p + SPAN);
    for (int64_t i = 0; i < g->queries; i++)
        g->o[i * (g->padded + NUMBERS) + g->padded] = total(load(g->sums + i * LANES));
}

void attend_section(int form, const group *g, int64_t begin, int64_t end) {
    switch (form) {
    case F32: attend_section_as(F32, g, begin, end); break;
    case BF16: attend_section_as(BF16, g, begin, end); break;
    default: attend_section_as(F16, g, begin, end);
    }
}

/* Add the results of a section to `totals`. */
void add_section(const group *g, int64_t begin, int64_t end, float *totals) {
    int64_t padded = g->padded, stride = padded + NUMBERS;
    for (int64_t i = 0; i < g->queries; i++) {
        const visible *row = g->rows + i / g->heads;
        float *o = totals + i * stride, *next = g->o + i * stride;
        if (row->count <= begin || row->skipped >= end) continue;
        float most = next[padded + 1] > o[padded + 1] ? next[padded + 1] : o[padded + 1];
        float a = exponential(fill(o[padded + 1] - most))[0], b = exponential(fill(next[padded + 1] - most))[0];
        for (int64_t d = 0; d < padded; d += LANES) store(o + d, load(o + d) * a + load(next + d) * b);
        o[padded] = o[padded] * a + next[padded] * b, o[padded + 1] = most;
    }
}
