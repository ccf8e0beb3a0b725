/* Number formats of weights, and their place in a matrix */
#pragma once
#include "blocks.h"

/* Name, bits, group, scales, scale form, peak of activations, step and offset */
static const format FORMATS[] = {
    [F32] = {"F32", 32, 0, 0, F32, 0, 0, 0},        [BF16] = {"BF16", 16, 0, 0, F32, 0, 0, 0},
    [F16] = {"F16", 16, 0, 0, F32, 0, 0, 0},        [INT8] = {"INT8", 8, 0, 1, F32, 127, 4, 0},
    [CODE4] = {"CODE4", 4, 64, 1, F32, 2047, 4, 0}, [Q8_0] = {"Q8_0", 8, 32, 1, F16, 32767, 4, 0},
    [Q4_0] = {"Q4_0", 4, 32, 1, F16, 32767, 8, 8},  [Q4_1] = {"Q4_1", 4, 32, 2, F16, 32767, 8, 0},
    [Q4_K] = {"Q4_K", 4, 32, 2, F32, 32767, 8, 0},  [Q6_K] = {"Q6_K", 8, 16, 1, F32, 32767, 4, 0},
};
enum { FORMAT_COUNT = sizeof FORMATS / sizeof *FORMATS };

/* Integers or codes, multiplied by quantised activations */
INLINE int is_coded(int form) { return FORMATS[form].activation_peak > 0; }
INLINE int has_bytes(int form) { return FORMATS[form].bits == 8; }
INLINE int has_minimum(int form) { return FORMATS[form].scales == 2; }
INLINE int64_t input_bytes(int form) { return FORMATS[form].bits * BLOCK / 8; } /* of a block */
/* Bytes of the scales of a group of inputs, per block */
INLINE int64_t scale_bytes(int form) {
    return FORMATS[form].scales * (FORMATS[form].scale_form == F16 ? 2 : 4) * BLOCK;
}
/* Inputs that share a scale: LLM.int8() without outliers (2208.07339) has one scale per row. */
INLINE int64_t group_inputs(const matrix *m) { return FORMATS[m->form].group ? FORMATS[m->form].group : m->inputs; }
INLINE int64_t block_count(const matrix *m) { return ((int64_t)m->outputs + BLOCK - 1) / BLOCK; }

int64_t position(const matrix *m, int64_t n, int64_t k, int *shift);
float weight_of(const matrix *m, int64_t n, int64_t k);
