/* Number formats of weights, and their place in a matrix */
#pragma once
#include "blocks.h"

static const format FORMATS[] = {
    [F32] = {.name = "F32", .bits = 32},
    [BF16] = {.name = "BF16", .bits = 16},
    [F16] = {.name = "F16", .bits = 16},
    [INT8] = {.name = "INT8", .bits = 8, .scales = 1, .activation_peak = 127, .step = 4},
    [CODE4] = {.name = "CODE4", .bits = 4, .group = 64, .scales = 1, .activation_peak = 2047, .step = 4},
    [Q8_0] = {.name = "Q8_0", .bits = 8, .group = 32, .scales = 1, .scale_form = F16, .activation_peak = 32767, .step = 4},
    [Q4_0] = {.name = "Q4_0", .bits = 4, .group = 32, .scales = 1, .scale_form = F16, .activation_peak = 32767, .step = 8, .offset = 8},
    [Q4_1] = {.name = "Q4_1", .bits = 4, .group = 32, .scales = 2, .scale_form = F16, .activation_peak = 32767, .step = 8},
    [Q4_K] = {.name = "Q4_K", .bits = 4, .group = 32, .scales = 2, .activation_peak = 32767, .step = 8},
    [Q6_K] = {.name = "Q6_K", .bits = 8, .group = 16, .scales = 1, .activation_peak = 32767, .step = 4},
};
enum { FORMAT_COUNT = sizeof FORMATS / sizeof *FORMATS };

/* Integers or codes, multiplied by quantised activations */
INLINE int is_coded(int form) { return FORMATS[form].activation_peak > 0; }
INLINE int has_bytes(int form) { return FORMATS[form].bits == 8; }
INLINE int has_minimum(int form) { return FORMATS[form].scales == 2; }
INLINE int64_t input_bytes(int form) { return FORMATS[form].bits * BLOCK / 8; } /* of a block */
/* Bytes of the scales of a group of inputs, per block */
INLINE int64_t scale_bytes(int form) { return FORMATS[form].scales * (FORMATS[form].scale_form == F16 ? 2 : 4) * BLOCK; }
/* Inputs that share a scale: LLM.int8() without outliers (2208.07339) has one scale per row. */
INLINE int64_t group_inputs(const matrix *m) { return FORMATS[m->form].group ? FORMATS[m->form].group : m->inputs; }
INLINE int64_t block_count(const matrix *m) { return ((int64_t)m->outputs + BLOCK - 1) / BLOCK; }

int64_t position(const matrix *m, int64_t n, int64_t k, int *shift);
float weight_of(const matrix *m, int64_t n, int64_t k);
