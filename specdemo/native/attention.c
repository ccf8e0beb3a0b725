/* Attention in blocks of positions (2205.14135).
 *
 * The visible positions of a row, in the order of the text, are divided into sections with fixed bounds, and sections
 * into spans. The spans of a section are accumulated in ascending order, then the sections are added in ascending
 * order. A row has the same bits whether its sections are computed by one thread or by several, alone or in a group of
 * rows that read keys and values once. */
#include "state.h"

#define MOST_QUERIES 6 /* of a tile */
#define WIDE 4         /* most vectors of a tile */
#define DIRECT 18      /* queries that read keys and values without a copy */
/* Queries of a tile of some vectors whose sums fit into registers */
#define TILE_QUERIES(vectors) (SUMS / (vectors) < MOST_QUERIES ? SUMS / (vectors) : MOST_QUERIES)
/* Vectors of a tile for a number of queries: fewer if tiles then share keys and values between more queries */
#define TILE_VECTORS(queries) ((queries) > TILE_QUERIES(WIDE) && TILE_QUERIES(2) > TILE_QUERIES(WIDE) ? 2 : WIDE)

INLINE int64_t far_slot(const visible *row, int64_t position) { return row->far[position - row->near]; }
INLINE int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }

/* Call with N = number of queries of a tile, for all tiles */
#define TILE_CASE(COUNT, MOST, CALL)                                                                                   \
    case COUNT: {                                                                                                      \
        enum { N = COUNT };                                                                                            \
        if (N <= (MOST)) CALL;                                                                                         \
        break;                                                                                                         \
    }
#define FOR_TILES(QUERIES, MOST, CALL)                                                                                 \
    for (int64_t tiles = ((QUERIES) + (MOST) - 1) / (MOST), tile = 0, i = 0, n; tile < tiles; tile++, i += n)          \
        switch (n = ((QUERIES) - i + tiles - tile - 1) / (tiles - tile)) {                                             \
            TILE_CASE(1, MOST, CALL)                                                                                   \
            TILE_CASE(2, MOST, CALL)                                                                                   \
            TILE_CASE(3, MOST, CALL)                                                                                   \
            TILE_CASE(4, MOST, CALL)                                                                                   \
            TILE_CASE(5, MOST, CALL)                                                                                   \
            TILE_CASE(6, MOST, CALL)                                                                                   \
        }

/* Memory that is prefetched meanwhile: `step` bytes per iteration, or one line again and again */
typedef struct {
    const char *at;
    int64_t step;
} upcoming;

INLINE upcoming upcoming_after(const char *at, int64_t bytes, upcoming next) {
    return next.step ? (upcoming){next.at + bytes, next.step} : (upcoming){at, 0};
}

INLINE void prefetch_step(upcoming next, int64_t i, int bytes) {
#pragma GCC unroll 4
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(next.at + i * next.step + line);
}

/* scores[queries][SPAN] of the positions of `vectors` vectors of keys */
INLINE void score_tile(int form, int queries, int vectors, const group *g, const char *keys, const float *q,
                       float *scores, upcoming next) {
    vf sum[MOST_QUERIES][WIDE];
#pragma GCC unroll 8
    for (int n = 0; n < queries; n++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[n][v] = (vf){0};
    for (int64_t d = 0; d < g->dim; d++) {
        vf key[WIDE];
        prefetch_step(next, d, vectors * LANES * (int)number_bytes(form));
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            int at = v * LANES;
            key[v] = load_as(form, keys, at / KEY_GROUP * KEY_GROUP * g->padded + at % KEY_GROUP + d * KEY_GROUP);
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
                       float *scores, upcoming next) {
    enum { LEAST = KEY_GROUP / LANES };
    const int64_t wide = larger_of(LEAST, TILE_VECTORS(queries)) * LANES, bytes = number_bytes(form);
    for (int64_t j = 0, width; j < count; j += width) {
        width = wide > KEY_GROUP && count - j > wide - KEY_GROUP ? wide : KEY_GROUP;
        const char *at = keys + j * g->padded * bytes;
        upcoming now = upcoming_after(at, j * g->padded * bytes, next), none = {at, 0};
        now.step = now.step ? width * bytes : 0;
        if (width == WIDE * LANES)
            FOR_TILES(queries, TILE_QUERIES(WIDE),
                      score_tile(form, N, WIDE, g, at, q + i * g->padded, scores + i * SPAN + j, tile ? none : now))
        else
            FOR_TILES(queries, TILE_QUERIES(LEAST),
                      score_tile(form, N, LEAST, g, at, q + i * g->padded, scores + i * SPAN + j, tile ? none : now))
    }
}

static __attribute__((noinline)) void score_floats(const group *g, const float *keys, int64_t count, const float *q,
                                                   int64_t queries, float *scores, upcoming next) {
    score_keys(F32, g, (const char *)keys, count, q, queries, scores, next);
}

/* o[queries] = o + weights[queries][SPAN] times the values of positions `start` to `end` */
INLINE void mix_tile(int form, int queries, int vectors, const group *g, const char *values, int64_t start, int64_t end,
                     const float *weights, float *o, upcoming next) {
    const int64_t stride = g->padded;
    vf mixed[MOST_QUERIES][WIDE];
#pragma GCC unroll 8
    for (int n = 0; n < queries; n++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) mixed[n][v] = load(o + n * stride + v * LANES);
    for (int64_t j = start; j < end; j++) {
        vf value[WIDE];
        prefetch_step(next, j, vectors * LANES * (int)number_bytes(form));
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            value[v] = load_as(form, values, j * g->padded + v * LANES);
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
                       int64_t queries, upcoming next) {
    const float *weights = g->scores + first * SPAN;
    float *o = g->o + first * g->padded;
    const int64_t stride = g->padded, bytes = number_bytes(form);
    if (start >= end) return;
    const int64_t wide = TILE_VECTORS(queries) * LANES;
    for (int64_t d = 0, width; d < g->padded; d += width) {
        width = d + wide <= g->padded ? wide : LANES;
        const char *at = values + d * bytes;
        upcoming now = upcoming_after(at, d * bytes, next), none = {at, 0};
        now.step = now.step ? g->padded * bytes : 0;
        if (width == WIDE * LANES)
            FOR_TILES(
                queries, TILE_QUERIES(WIDE),
                mix_tile(form, N, WIDE, g, at, start, end, weights + i * SPAN, o + i * stride + d, tile ? none : now))
        else if (width == 2 * LANES)
            FOR_TILES(
                queries, TILE_QUERIES(2),
                mix_tile(form, N, 2, g, at, start, end, weights + i * SPAN, o + i * stride + d, tile ? none : now))
        else
            FOR_TILES(
                queries, TILE_QUERIES(1),
                mix_tile(form, N, 1, g, at, start, end, weights + i * SPAN, o + i * stride + d, tile ? none : now))
    }
}

static __attribute__((noinline)) void mix_floats(const group *g, const float *values, int64_t start, int64_t end,
                                                 int64_t first, int64_t queries, upcoming next) {
    mix_values(F32, g, (const char *)values, start, end, first, queries, next);
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

/* Positions of a span, relative to its first, that a row sees: those from `from` to `near` are adjacent in the cache,
 * those from `near` to `to` are listed in `far`. */
typedef struct {
    int64_t from, near, to;
} range;

static range range_of(const visible *row, int64_t p, int64_t end) {
    int64_t from = clamp(row->skipped - p, end - p), near = clamp(row->near - p, end - p);
    return (range){from, near > from ? near : from, clamp(row->count - p, end - p)};
}

/* Largest of the scores `from` to `to` of a query */
INLINE float largest_score(const group *g, float *w, int64_t from, int64_t to) {
    int64_t low = from / LANES * LANES;
    vf most = fill(-INFINITY);
    if (g->cap) cap(w + low, (to - low + LANES - 1) / LANES * LANES, g->cap);
#pragma GCC unroll 4
    for (int64_t j = low; j < to; j += LANES) {
        if (j < from || j + LANES > to) store(w + j, lanes_between(load(w + j), fill(-INFINITY), j, from, to));
        most = larger(load(w + j), most);
    }
    return largest(most);
}

/* Replace scores `from` to `to` of a query by weights, and add them to `sum`. */
INLINE vf weigh(float *w, float peak, int64_t from, int64_t to, vf sum) {
#pragma GCC unroll 4
    for (int64_t j = from / LANES * LANES; j < to; j += LANES) {
        vf weights = exponential(load(w + j) - peak);
        if (j < from || j + LANES > to) weights = lanes_between(weights, (vf){0}, j, from, to);
        store(w + j, weights);
        sum += weights;
    }
    return sum;
}

/* Replace the scores of a span by weights, relative to the largest score of the section so far. */
static void weigh_span(const group *g, const range *seen) {
    float *peaks = peaks_of(g, g->o);
    for (int64_t i = 0; i < g->queries; i++) {
        range of = seen[i / g->heads];
        float *w = g->scores + i * SPAN;
        if (of.from == 0 && of.to == SPAN)
            g->factors[i] = largest_score(g, w, 0, SPAN);
        else
            g->factors[i] = of.from < of.to ? largest_score(g, w, of.from, of.to) : -INFINITY;
    }
    for (int64_t i = 0; i < g->queries; i += LANES) {
        vf before = load(peaks + i), next = load(g->factors + i);
        vi is_larger = next > before;
        store(g->factors + i, choose(is_larger, exponential(before - next), fill(1.0f)));
        store(peaks + i, choose(is_larger, next, before));
    }
    for (int64_t i = 0; i < g->queries; i++) {
        range of = seen[i / g->heads];
        float *w = g->scores + i * SPAN, *o = g->o + i * g->padded, factor = g->factors[i];
        if (of.from >= of.to) continue;
        for (int64_t d = 0; d < g->padded; d += LANES) store(o + d, load(o + d) * factor);
        vf sum = load(g->sums + i * LANES) * factor;
        if (of.from == 0 && of.to == SPAN)
            sum = weigh(w, peaks[i], 0, SPAN, sum);
        else
            sum = weigh(w, peaks[i], of.from, of.to, sum);
        store(g->sums + i * LANES, sum);
    }
}

INLINE void score_far(int form, const group *g, int64_t r, range seen, int64_t p) {
    int64_t last = -1;
    for (int64_t j = seen.near; j < seen.to; j++) {
        int64_t slot = far_slot(g->rows + r, p + j), start = slot / KEY_GROUP * KEY_GROUP;
        if (start != last) {
            const float *keys = widened(form, g->keys, start * g->padded, KEY_GROUP * g->padded, g->key_tile);
            score_floats(g, keys, KEY_GROUP, g->q + r * g->heads * g->padded, g->heads, g->far_scores, (upcoming){0});
            last = start;
        }
        for (int64_t h = 0; h < g->heads; h++)
            g->scores[(r * g->heads + h) * SPAN + j] = g->far_scores[h * SPAN + slot % KEY_GROUP];
    }
}

INLINE void mix_far(int form, const group *g, int64_t r, range seen, int64_t p) {
    for (int64_t j = seen.near; j < seen.to; j++)
        widen(form, g->values, far_slot(g->rows + r, p + j) * g->padded, g->padded, g->value_tile + j * g->padded);
    mix_floats(g, g->value_tile, seen.near, seen.to, r * g->heads, g->heads, (upcoming){0});
}

/* Add the positions from p to `end`, at most SPAN, to the results of a section, and prefetch those from `after` on. */
INLINE void attend_span(int form, const group *g, int64_t p, int64_t end, const char *const after[2]) {
    range seen[GROUP_QUERIES];
    const int64_t at = p * g->padded * number_bytes(form);
    const char *keys = g->keys + at, *values = g->values + at;
    int direct = form != F32 && g->queries <= DIRECT; /* numbers are converted where they are used */
    int64_t near = 0, first = 0, last = SPAN;         /* all rows see the positions from `first` to `last` */
    for (int64_t r = 0; r < g->row_count; r++) {
        seen[r] = range_of(g->rows + r, p, end);
        if (seen[r].near > seen[r].from) near = larger_of(near, seen[r].near);
        first = larger_of(first, seen[r].from), last = seen[r].near < last ? seen[r].near : last;
    }
    if (first >= last) first = last = SPAN;
    if (direct) {
        score_keys(form, g, keys, near, g->q, g->queries, g->scores, (upcoming){after[0], after[0] != 0});
    } else if (near) {
        int64_t whole = (near + KEY_GROUP - 1) / KEY_GROUP * KEY_GROUP;
        score_floats(g, widened(form, keys, 0, whole * g->padded, g->key_tile), near, g->q, g->queries, g->scores,
                     (upcoming){after[0], form == F32 && after[0]});
    }
    for (int64_t r = 0; r < g->row_count; r++) score_far(form, g, r, seen[r], p);
    weigh_span(g, seen);
    if (!direct && near) values = (const char *)widened(form, values, 0, near * g->padded, g->value_tile);
    for (int64_t part = 0; near && part <= 2 * g->row_count; part++) { /* of each row, of all rows, of each row */
        int64_t r = part % (g->row_count + 1), heads = g->heads;
        range now = {first, last, 0};
        if (part < g->row_count)
            now = (range){seen[r].from, seen[r].near < first ? seen[r].near : first, 0};
        else if (part == g->row_count)
            r = 0, heads = g->queries;
        else
            now = (range){larger_of(seen[r].from, last), seen[r].near, 0};
        upcoming next = {after[1], part == g->row_count && after[1] && (direct || form == F32)};
        if (now.from >= now.near) continue;
        if (direct)
            mix_values(form, g, values, now.from, now.near, r * g->heads, heads, next);
        else
            mix_floats(g, (const float *)values, now.from, now.near, r * g->heads, heads, next);
    }
    for (int64_t r = 0; r < g->row_count; r++) mix_far(form, g, r, seen[r], p);
}

void clear_results(const group *g, float *o) {
    memset(o, 0, g->queries * g->padded * sizeof *o);
    for (int64_t i = 0; i < g->queries; i += LANES)
        store(weight_sums(g, o) + i, (vf){0}), store(peaks_of(g, o) + i, fill(-INFINITY));
}

/* Compute weighted values, their sum of weights and the largest score of positions `begin` to `end` in g->o. */
INLINE void attend_section_as(int form, const group *g, int64_t begin, int64_t end) {
    memset(g->sums, 0, g->queries * LANES * sizeof *g->sums);
    clear_results(g, g->o);
    for (int64_t p = begin; p < end; p += SPAN) {
        int64_t next = (p + SPAN) * g->padded * number_bytes(form);
        const char *following[2] = {g->keys + next, g->values + next};
        if (p + SPAN < end)
            attend_span(form, g, p, p + SPAN, following);
        else
            attend_span(form, g, p, end, g->after);
    }
    for (int64_t i = 0; i < g->queries; i++) weight_sums(g, g->o)[i] = total(load(g->sums + i * LANES));
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
    float *peaks = peaks_of(g, totals), *next_peaks = peaks_of(g, g->o);
    for (int64_t first = 0; first < g->queries; first += LANES) {
        vf before = load(peaks + first), next = load(next_peaks + first), most = choose(next > before, next, before);
        float a[LANES], b[LANES], largest_scores[LANES];
        store(a, exponential(before - most)), store(b, exponential(next - most)), store(largest_scores, most);
        for (int64_t i = first; i < g->queries && i < first + LANES; i++) {
            const visible *row = g->rows + i / g->heads;
            float *o = totals + i * g->padded, *more = g->o + i * g->padded;
            if (row->count <= begin || row->skipped >= end) continue;
            for (int64_t d = 0; d < g->padded; d += LANES)
                store(o + d, load(o + d) * a[i - first] + load(more + d) * b[i - first]);
            float *sum = weight_sums(g, totals) + i;
            *sum = *sum * a[i - first] + weight_sums(g, g->o)[i] * b[i - first];
            peaks[i] = largest_scores[i - first];
        }
    }
}
