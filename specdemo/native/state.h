/* Buffers of a pass, and the operations of its phases */
#pragma once
#include "products.h"

typedef struct {
    const pass *p;
    float *rows;     /* [rows][width] residual stream */
    float *input;    /* [rows][wider of width and heads * head_dim] input of qkv, out, gate_up and head */
    float *gated;    /* [rows][inner] input of down */
    float *qkv;      /* [rows][(heads + 2 kv_heads) head_dim]; later outputs [rows][width] that are not added at once */
    float *query;    /* [rows][heads][padded head_dim] */
    void *quantised; /* words [rows][inputs]; INT8: inputs rounded up to 4, bytes with INT8_BYTES */
    float *x_scales; /* of quantised activations: [rows], or [rows][groups] */
    int32_t *x_sums; /* [rows][groups] */
    float *head;     /* [2][padded head_dim] of rotate */
    int stopped;     /* 1 if the flag of the pass was seen; then results are incomplete */
    int first;       /* first row with logits */
} state;

INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t padded_dim(const model *m) { return ((int64_t)m->head_dim + 15) / 16 * 16; }
INLINE int64_t input_width(const model *m) { return larger_of((int64_t)m->heads * m->head_dim, m->width); }
INLINE int64_t qkv_width(const model *m) { return ((int64_t)m->heads + 2 * (int64_t)m->kv_heads) * m->head_dim; }

/* state.c */
state lay_out(const pass *p);
int is_stopped(state *s);
/* rows.c */
void add(float *o, const float *x, int64_t count);
void rms_norm(const float *x, const float *gain, float epsilon, int64_t width, float *o);
void *quantised_row(const state *s, const matrix *m, int64_t r);
void quantise_rows(state *s, const matrix *next, const float *inputs, int64_t input_stride, int first);
void normalise(state *s, const float *gain, const matrix *next, int first);
void embed(state *s);
void add_outputs(state *s, const float *gain);
void copy_hidden(state *s, int l);
/* attention.c */
void rotate(state *s, int l);
void attend(state *s, int l, int r, int kv, float *buffer);
int64_t attention_floats(const pass *p);
/* layers.c */
int64_t chunk_count(const state *s, int phase);
void run_chunk(state *s, int phase, int64_t chunk, float *buffer);
int finish_phase(state *s, int phase);
