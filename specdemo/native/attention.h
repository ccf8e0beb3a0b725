/* Cache of keys and values, and attention of a group of rows */
#pragma once
#include "functions.h"
#include "state.h"

#define KEY_GROUP 16 /* adjacent positions of a number of the keys */
#define SPAN 64      /* positions whose scores are computed at once */
#define GROUP_QUERIES 48

/* Positions that a row sees: `near` leading positions of the cache, then those in `far`, without the first `skipped` */
typedef struct {
    const int32_t *far;
    int64_t near, count, skipped;
} visible;

/* Rows of a text and the query heads of one key head; a query is a head of a row. */
typedef struct {
    const char *keys, *values;
    const visible *rows;
    int64_t row_count, heads, queries, dim, padded;
    float cap;
    const float *q;       /* [queries][padded] */
    float *scores;        /* [queries][SPAN], later weights */
    float *sums;          /* [queries][LANES] of weights */
    float *factors;       /* [queries] of the results so far, before largest scores of a span */
    float *key_tile;      /* [SPAN][padded] */
    float *value_tile;    /* [SPAN][padded] */
    float *far_scores;    /* [heads][SPAN] of the keys of a group */
    float *o;             /* results of a section: [queries][padded], then weight_sums() and peaks_of() */
    const char *after[2]; /* keys and values that are needed after the section, or null */
} group;

INLINE int64_t number_bytes(int form) { return form == F32 ? 4 : 2; }

/* Numbers of the results of a section */
INLINE int64_t whole_vectors(int64_t count) { return (count + LANES - 1) / LANES * LANES; }
INLINE int64_t floats_of_results(int64_t queries, int64_t padded) {
    return queries * padded + 2 * whole_vectors(queries);
}
/* [queries] sums of the weights, and the largest scores */
INLINE float *weight_sums(const group *g, float *o) { return o + g->queries * g->padded; }
INLINE float *peaks_of(const group *g, float *o) { return weight_sums(g, o) + whole_vectors(g->queries); }

/* Keys of head h, or values of head h - kv_heads */
INLINE char *cached_head(const text *t, const model *m, int l, int64_t h) {
    return t->cache + ((int64_t)l * 2 * m->kv_heads + h) * t->capacity * padded_dim(m) * number_bytes(m->cache_form);
}

/* attention.c */
void clear_results(const group *g, float *o);
void attend_section(int form, const group *g, int64_t begin, int64_t end);
void add_section(const group *g, int64_t begin, int64_t end, float *totals);
