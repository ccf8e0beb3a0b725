/* State of a pass: its buffers, the cache, groups of rows in attention, and the functions of its phases */
#pragma once
#include "matrices.h"

/* Quantised activations */
typedef struct {
    void *x;                 /* words [rows][inputs]; INT8: inputs rounded up to 4, bytes with BYTE_PRODUCTS */
    float *scales;           /* [rows], or [rows][groups] */
    correction *corrections; /* [rows][groups] */
} integer_rows;

typedef struct {
    const pass *p;
    float *rows;  /* [rows][width] residual stream */
    float *input; /* [rows][input_width()] input of qkv, out, gate_up and head */
    float *gated; /* [rows][inner_width()] inputs of down and fuse */
    float *qkv;   /* [rows][(heads + 2 kv_heads) head_dim]; later outputs [rows][width] that are not added at once */
    float *query; /* [kv_heads][rows][heads / kv_heads][padded head_dim] */
    integer_rows input_integers, gated_integers;
    float *rotation_buffer;    /* [2][padded head_dim] of rotate */
    float *results;            /* of divided attention, see groups.c */
    struct sections *sections; /* the same, or null */
    int64_t attention_units;
    int32_t *text_of, *logit_rows; /* [rows] text of a row; [last] rows with logits */
    int stopped;                   /* 1 if the flag of the pass was seen; then results are incomplete */
    int last;                      /* rows with logits */
    int first;                     /* phase */
} state;

typedef struct {
    int64_t first, count;
} row_range;

INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t padded_dim(const model *m) { return ((int64_t)m->head_dim + 15) / 16 * 16; }
/* Inputs of the first layer: a drafting head also receives the residual stream. */
INLINE int64_t entry_width(const model *m) { return (m->fuse ? 2 : 1) * (int64_t)m->width; }
INLINE int64_t input_width(const model *m) { return larger_of((int64_t)m->heads * m->head_dim, entry_width(m)); }
INLINE int64_t inner_width(const model *m) { return m->fuse ? larger_of(m->inner, m->fuse->inputs) : m->inner; }
INLINE int64_t qkv_width(const model *m) { return ((int64_t)m->heads + 2 * (int64_t)m->kv_heads) * m->head_dim; }

/* Integers of `input` or `gated` */
INLINE const integer_rows *integers_of(const state *s, const float *inputs) {
    return inputs == s->gated ? &s->gated_integers : &s->input_integers;
}

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

/* state.c */
state lay_out(const pass *p);
int is_stopped(state *s);
int needs_queries(const state *s, int l);
/* rows.c */
void add(float *o, const float *x, int64_t count);
void rms_norm(const float *x, const float *gain, float epsilon, int64_t width, float *o);
void quantise_rows(state *s, const matrix *next, const float *inputs, int64_t input_stride, int rows);
void quantise_part(state *s, const matrix *next, int64_t first, int64_t end, const float *inputs, int64_t stride,
                   row_range r);
void normalise(state *s, const float *gain, const matrix *next);
void normalise_last(state *s);
void prepare_inputs(state *s);
void combine(state *s);
void add_outputs(state *s, const float *gain);
void copy_states(state *s, int l);
void rotate(state *s, int l);
/* attention.c */
void clear_results(const group *g, float *o);
void attend_section(int form, const group *g, int64_t begin, int64_t end);
void add_section(const group *g, int64_t begin, int64_t end, float *totals);
/* groups.c */
int64_t attention_floats(const model *m);
int64_t section_floats(const pass *p);
void divide_attention(state *s, float *results);
void attend(state *s, int l, int64_t unit, float *buffer);
/* layers.c */
#define FUSE (-1) /* phase before those of the layers */
#define TIMES 7   /* stages of a pass, and the head */
int stage_of(const state *s, int phase);
int64_t chunk_count(const state *s, int phase);
void run_chunk(state *s, int phase, int64_t chunk, float *buffer);
int finish_phase(state *s, int phase);
/* thread_pool.c */
#define MAX_THREADS 64
int run_phases(state *s, int threads, int64_t floats);
