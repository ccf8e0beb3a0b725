/* Structures, constants and functions of the library: interface.py reads this file. */
#pragma once
#include <stdint.h>

/* Number formats of weights. The last five contain integers of GGUF files: s q, s (q - 8), s q + m, s q + m and s q,
 * where s is the scale and m the minimum of 32 inputs (Q6_K: 16). */
enum form { F32, BF16, F16, INT8, CODE4, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K };

/* Names, and the numbers of `format` in matrices.h */
#define FORMAT_LIST(X)                                                                                                 \
    X(F32, 32, 0, 0, F32, 0, 0, 0)                                                                                     \
    X(BF16, 16, 0, 0, F32, 0, 0, 0)                                                                                    \
    X(F16, 16, 0, 0, F32, 0, 0, 0)                                                                                     \
    X(INT8, 8, 0, 1, F32, 127, 4, 128)                                                                                 \
    X(CODE4, 4, 64, 1, F32, 2047, WORD_CODES ? 8 : 4, 0)                                                               \
    X(Q8_0, 8, 32, 1, F16, 32639, 4, 128)                                                                              \
    X(Q4_0, 4, 32, 1, F16, 32639, 8, 8)                                                                                \
    X(Q4_1, 4, 32, 2, F16, 32639, 8, 0)                                                                                \
    X(Q4_K, 4, 32, 2, F32, 32639, 8, 0)                                                                                \
    X(Q6_K, 8, 16, 1, F32, 32639, 4, 128)

/* Weights of a linear layer: n outputs, rounded up to whole blocks in all arrays, and k inputs. */
typedef struct {
    const void *weights; /* [n / BLOCK][k][BLOCK], see position */
    /* INT8: float [n]; CODE4: float [n / BLOCK][k / 64][BLOCK]; Q8_0, Q4_0: half [n / BLOCK][k / 32][BLOCK];
     * Q4_1: half, Q4_K: float [n / BLOCK][k / 32][s, m][BLOCK]; Q6_K: float [n / BLOCK][k / 16][BLOCK] */
    const void *scales;
    const float *codes;        /* CODE4: 16 values */
    const uint8_t *code_bytes; /* CODE4: low, then high bytes of the values as integers, see set_code_bytes */
    const float *bias;         /* [n] or null */
    int32_t form, outputs, inputs;
    int32_t byte_inputs; /* forms of GGUF files: activations have 8 instead of 16 bits */
} matrix;

enum activation { SILU, GELU_TANH, GELU_ERF };

typedef struct {
    matrix qkv, value;                  /* value: of another form than query and key, or without weights */
    matrix out, gate_up, down;          /* gate_up: blocks of gate and up alternate; without gate: up */
    const float *input_norm, *mlp_norm; /* gains of norms, and biases of LayerNorm */
    const float *query_norm, *key_norm, *post_attention_norm, *post_mlp_norm; /* the same, or null */
    float attention_scale;
    int32_t window; /* last positions that a row sees, or 0 */
} layer;

typedef struct {
    const layer *const *layers;
    const matrix *embedding;    /* or null: `head` */
    const matrix *positions;    /* added to the embedding, or null */
    const float *channel_scale; /* factors of the embedding channels, or null */
    /* A drafting head (EAGLE-3, 2503.01840): `fuse` maps the target's states to the residual stream, and the first
     * layer receives [normalised embedding; stream normalised with `stream_norm`]; or null */
    const matrix *fuse;
    const float *stream_norm, *final_norm;
    matrix head;
    int32_t layer_count, width, inner, heads, kv_heads, head_dim, cache_form;
    int32_t rotated; /* values of a head */
    int32_t activation, gated, centred,
        parallel;                 /* centred: LayerNorm; parallel: attention and MLP have the same input */
    int32_t norm_before_residual; /* the stream of a drafting head is replaced by the normalised one */
    float epsilon, embedding_scale, attention_cap, logit_cap; /* cap * tanh(x / cap), or 0 */
} model;

/* A text of a pass: its cache, and its rows, which follow those of the previous text. */
typedef struct {
    char *cache;                /* [layers][keys then values of kv_heads], see rows.c */
    float *states;              /* [capacity][taps][width] hidden states, or null */
    const float *target_states; /* [rows][inputs of `fuse`]; null: one row continues `own_state` */
    float *own_state;           /* [width] stream that leaves the last layer of the last row of a drafting head */
    int64_t capacity;
    int32_t rows, held; /* row i is stored at cache position held + i */
    int32_t last;       /* rows with logits, the last ones of the text */
} text;

typedef struct {
    const model *model;
    const text *texts;
    const float *cosines, *sines; /* [rotations][rotated / 2] */
    const int32_t *ids;           /* [rows] */
    int32_t *positions;           /* [rows] */
    int32_t *prefix;              /* [rows] leading cache positions of the text that the row sees */
    /* Further visible positions of row r: extra[extra_start[r]..extra_start[r + 1]] */
    const int32_t *extra;
    int32_t *extra_start;
    const int32_t *taps; /* [tap_count] hidden states: i enters layer i, layer_count leaves the final norm */
    float *logits;       /* [last rows of all texts][vocabulary] */
    float *scratch;      /* scratch_floats() */
    const int32_t *stop; /* the pass ends early when this is not 0; or null */
    /* Nanoseconds, summed over threads: QKV, value, attention, out, gate, down and head, then what follows each; or
     * null
     */
    int64_t *times;
    int32_t text_count, rows, rotations, tap_count, threads;
} pass;

typedef struct {
    float temperature;
    double top_p, min_p;
    int64_t top_k; /* 0: all */
} sampling;

typedef struct {
    sampling sampling;
    const double *uniforms;          /* [count]; temperature 0: unused */
    float *probs, *scratch;          /* [count][vocab], [vocab]; the same */
    float *max_logits, *token_probs; /* [count] largest logits, probabilities of the tokens */
    int32_t *tokens;                 /* [count] */
    const int32_t *ids;              /* [vocab] tokens of the logits; null: their indices */
    int64_t vocab;                   /* the first `vocab` logits are considered */
    /* The chain ends before token i if the product of the largest probabilities at temperature 1 up to it is below
     * `min_path_prob[i]`. No pass is spent on a token if the square of the product before it is below. All 0: no
     * effect.
     */
    const float *min_path_prob;     /* [count] */
    int32_t count, drafted, passes; /* drafted, passes: output */
} chain;

enum result { DONE, NO_MEMORY, STOPPED, INVALID };

int64_t interface_digest(void);
int block_outputs(void);
int vector_outputs(void);
const char *vector_extensions(void);
void set_code_bytes(const float *codes, uint8_t *bytes);
void matrix_rows(const matrix *m, const int64_t *outputs, int64_t count, float *rows);
const char *check_model(const model *m);
const char *check_pass(const pass *p);
int64_t scratch_floats(const model *m, int32_t rows);
int run_pass(const pass *requested);
void expect_pass(const model *m);
int draft_chain(const pass *first, chain *c);
int write_rows(const matrix *m, int64_t first, int64_t count, const float *rows);
int copy_rows(const matrix *from, const int32_t *outputs, int64_t count, const matrix *to, int64_t first);
int self_check(void);

void largest_logits(const float *logits, int64_t rows, int64_t stride, int64_t count, int32_t *tokens, float *values);
void distributions(const float *logits, int64_t rows, int64_t stride, int64_t count, const sampling *s, float *probs,
                   float *scratch);
void distribution(const float *x, int64_t count, int32_t best, const sampling *s, float *p, float *scratch);
double largest_probability(const float *logits, int64_t count, float peak);
int64_t invert(const float *probs, int64_t count, double uniform);
int compare_drafts(const float *p, const float *q, int64_t count, int64_t n, const int32_t *parents,
                   const int32_t *tokens, float *token_probs, float *overlaps);
int compare_sparse_drafts(const float *p, const int64_t *ids, const float *q, int64_t size, int64_t count, int64_t n,
                          const int32_t *parents, const int32_t *tokens, float *token_probs, float *overlaps);
int token_ranks(const float *p, int64_t count, int64_t n, const int32_t *parents, const int32_t *tokens,
                int32_t *ranks);
void summarize(const float *probs, int64_t rows, int64_t stride, int64_t count, int64_t size, int32_t *tokens,
               float *values, double *entropies);
double excess(const float *p, const float *q, float weight, int64_t count);
double residual(const float *p, const float *q, float weight, int64_t count, float *o);
double sparse_residual(const float *p, const int64_t *ids, const float *q, int64_t size, float weight, int64_t count,
                       float *o);
