/* Number formats of weights, and their place in a matrix; formats.py reads the list. */
#pragma once
#include "blocks.h"

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

/* Names, and the numbers of `format` */
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
