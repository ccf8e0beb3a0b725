/* Matrices: blocks of outputs, number formats, the place of single weights, and products with rows of activations */
#pragma once
#include "vectors.h"

/* Rows of a tile, and vectors of sums that fit into registers */
#if LANES == 16
#define TILE_ROWS 12
#define SUMS 24
#elif defined(__aarch64__)
#define TILE_ROWS 6
#define SUMS 24
#else
#define TILE_ROWS 6
#define SUMS 12
#endif
/* Vectors per block of outputs: 2 or 4 */
#ifndef VECTORS
#if defined(__aarch64__)
#define VECTORS 4
#else
#define VECTORS 2
#endif
#endif
#define BLOCK (VECTORS * LANES)
#define UNIT_BLOCKS 4 /* blocks per product */
#define UNIT (UNIT_BLOCKS * BLOCK)
#define TILE_INPUTS 64
#define WORD_CODES (LANES == 16) /* codes are looked up as words */
#define EXACT 32                 /* inputs per exact sum of products of 16-bit integers */
#define STRIP 128                /* inputs decoded at once for many rows */
/* Blocks whose sums of `rows` rows fit into registers with the inputs. */
#define FIT(rows) ((rows) * 4 * VECTORS < SUMS ? 4 : (rows) * 2 * VECTORS < SUMS ? 2 : 1)

/* A number format of weights */
typedef struct {
    int32_t bits;            /* of a stored weight */
    int32_t group;           /* inputs that share a scale; 0: all inputs of an output */
    int32_t scales;          /* numbers per group and output: none, scale, or scale and minimum */
    int32_t scale_form;      /* of these numbers */
    int32_t activation_peak; /* largest integer of quantised activations; 0: activations are floats */
    int32_t step;            /* inputs decoded at once */
    int32_t offset;          /* subtracted from each stored, unsigned integer */
} format;

#define ENTRY(NAME, BITS, GROUP, SCALES, SCALE, PEAK, STEP, OFFSET)                                                    \
    [NAME] = {BITS, GROUP, SCALES, SCALE, PEAK, STEP, OFFSET},
static const format FORMATS[] = {FORMAT_LIST(ENTRY)};

/* Numbers of a format for kernels: compilers resolve a switch earlier than an array. */
/* clang-format off */
#define BITS_CASE(NAME, BITS, GROUP, SCALES, SCALE, PEAK, STEP, OFFSET) case NAME: return BITS;
#define GROUP_CASE(NAME, BITS, GROUP, SCALES, SCALE, PEAK, STEP, OFFSET) case NAME: return GROUP;
#define SCALES_CASE(NAME, BITS, GROUP, SCALES, SCALE, PEAK, STEP, OFFSET) case NAME: return SCALES;
#define SCALE_CASE(NAME, BITS, GROUP, SCALES, SCALE, PEAK, STEP, OFFSET) case NAME: return SCALE;
#define STEP_CASE(NAME, BITS, GROUP, SCALES, SCALE, PEAK, STEP, OFFSET) case NAME: return STEP;
#define OFFSET_CASE(NAME, BITS, GROUP, SCALES, SCALE, PEAK, STEP, OFFSET) case NAME: return OFFSET;
INLINE int32_t bits_of(int form) { switch (form) { FORMAT_LIST(BITS_CASE) } return 0; }
INLINE int32_t group_of(int form) { switch (form) { FORMAT_LIST(GROUP_CASE) } return 0; }
INLINE int32_t scales_of(int form) { switch (form) { FORMAT_LIST(SCALES_CASE) } return 0; }
INLINE int32_t scale_form_of(int form) { switch (form) { FORMAT_LIST(SCALE_CASE) } return 0; }
INLINE int32_t step_of(int form) { switch (form) { FORMAT_LIST(STEP_CASE) } return 0; }
INLINE int32_t offset_of(int form) { switch (form) { FORMAT_LIST(OFFSET_CASE) } return 0; }
/* clang-format on */

enum { FORMAT_COUNT = sizeof FORMATS / sizeof *FORMATS };

/* Integers or codes, multiplied by quantised activations */
INLINE int is_coded(int form) { return FORMATS[form].activation_peak > 0; }
INLINE int has_bytes(int form) { return bits_of(form) == 8; }
INLINE int has_minimum(int form) { return scales_of(form) == 2; }
INLINE int64_t input_bytes(int form) { return bits_of(form) * BLOCK / 8; } /* of a block */
/* Bytes of the scales of a group of inputs, per block */
INLINE int64_t scale_bytes(int form) { return scales_of(form) * (scale_form_of(form) == F16 ? 2 : 4) * BLOCK; }
/* Inputs that share a scale: LLM.int8() without outliers (2208.07339) has one scale per row. */
INLINE int64_t group_inputs(const matrix *m) { return FORMATS[m->form].group ? FORMATS[m->form].group : m->inputs; }
INLINE int64_t block_count(const matrix *m) { return ((int64_t)m->outputs + BLOCK - 1) / BLOCK; }

int64_t position(const matrix *m, int64_t n, int64_t k, int *shift);
void read_row(const matrix *m, int64_t n, float *o);

/* Number that a group of activations adds to its products: forms with an offset: -offset times the sum of the integers;
 * forms with minima: the sum of the activations, which is multiplied by the minimum */
typedef union {
    int32_t offset;
    float sum;
} correction;

/* Quantised activations: integers, and scales and corrections of the groups */
typedef struct {
    const void *x;
    const float *scales;
    const correction *corrections;
} activations;

/* Formats without codes: x[rows][stride] */
void float_product(const matrix *m, int64_t first, int blocks, const float *x, int64_t stride, int rows, float *o);
/* Formats with codes, except INT8 */
void coded_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o);
/* Integers of GGUF files, with activations of 8 bits */
void narrow_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o);
/* INT8 */
void byte_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o);

/* Activations have 16 bits, with `byte_inputs` 8. Where the CPU multiplies bytes, those of INT8 have 8. With SPLIT,
 * every four others (except those of CODE4) are stored as four lower and four upper bytes: as many products as of
 * words, without conversion of the weights, but 16 registers are too few. */
#if (defined(__AVX512VNNI__) && LANES == 16) || (defined(__AVXVNNI__) && LANES == 8)
#define BYTE_PRODUCTS 1
#else
#define BYTE_PRODUCTS 0
#endif
#define SPLIT (BYTE_PRODUCTS && LANES == 16)
INLINE int activation_bytes(const matrix *m) { return m->byte_inputs || (m->form == INT8 && BYTE_PRODUCTS) ? 1 : 2; }
INLINE int64_t activation_stride(const matrix *m) { return ((int64_t)m->inputs + 3) / 4 * 4; }
/* Parts of `count` inputs have groups of their own. */
INLINE int has_parts(const matrix *m, int64_t count) {
    return is_coded(m->form) && FORMATS[m->form].group && count % FORMATS[m->form].group == 0;
}
/* Quantise the inputs from `first` to `end` of a row. */
void quantise_inputs(const matrix *m, int64_t first, int64_t end, const float *x, void *to, float *scales,
                     correction *corrections);

INLINE vi broadcast(const void *x) {
    int32_t number;
    memcpy(&number, x, sizeof number);
    return number - (vi){0};
}

INLINE vi multiply_pairs(vi sum, vi w, vi x) { /* pairs of 16-bit integers */
#if defined(__AVX512VNNI__) && LANES == 16
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif LANES == 16
    return sum + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && LANES == 8
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__AVX2__)
    return sum + (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__) && LANES == 4
    return sum + (vi)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
    return sum + (w << 16 >> 16) * (x << 16 >> 16) + (w >> 16) * (x >> 16);
#endif
}

INLINE vi multiply_bytes(vi sum, vi w, vi x) { /* four unsigned and four signed bytes per number */
#if BYTE_PRODUCTS && LANES == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif BYTE_PRODUCTS
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#else
    sum = multiply_pairs(sum, w & 0x00ff00ff, (vi)((vs)(x << 8) >> 8));
    return multiply_pairs(sum, w >> 8 & 0x00ff00ff, (vi)((vs)x >> 8));
#endif
}

/* Products of integers and codes with one scale per output and group of inputs, and of activations with one per row and
 * group */

#define QUADS (EXACT / 4)

/* Inputs of a block */
typedef struct {
    const uint8_t *w;
    const vi *tile; /* decoded words, or null */
    const char *scales;
    const void *x;                 /* [rows][stride] integers */
    const float *x_scales;         /* [rows][groups] */
    const correction *corrections; /* [rows][groups]; forms with an offset or minimum */
    int64_t count, stride, groups;
} coded_slice;

INLINE vu load_stored(const uint8_t *p) {
    vu stored;
    memcpy(&stored, p, sizeof stored);
    return stored;
}

/* Scales and minima of a group of inputs */
typedef struct {
    vf scale[VECTORS], minimum[VECTORS];
} group_scales;

INLINE group_scales read_scales(int form, const char *scales) {
    group_scales read;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        read.scale[v] = load_as(scale_form_of(form), scales, v * LANES);
        if (has_minimum(form)) read.minimum[v] = load_as(scale_form_of(form), scales, BLOCK + v * LANES);
    }
    return read;
}

/* o + sum of products times the scales of row r */
INLINE vf scaled(int form, const coded_slice *s, int64_t at, const group_scales *g, int v, vi sum, vf o) {
    o += __builtin_convertvector(sum, vf) * s->x_scales[at] * g->scale[v];
    return has_minimum(form) ? o + g->minimum[v] * s->corrections[at].sum : o;
}

/* Initial sums of products */
INLINE vi start_of(int form, const coded_slice *s, int64_t at) {
    return (offset_of(form) ? s->corrections[at].offset : 0) - (vi){0};
}
