/* Products of rows of activations and blocks of weights, for one unit of work: o[rows][UNIT] */
#pragma once
#include "formats.h"

/* Quantised activations: integers, and scales and sums of the groups */
typedef struct {
    const void *x;
    const float *scales;
    const int32_t *sums;
} activations;

/* Formats without codes: x[rows][stride] */
void float_product(const matrix *m, int64_t first, int blocks, const float *x, int64_t stride, int rows, float *o);
/* Formats with codes; INT8 as well where the CPU multiplies bytes */
void coded_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o);
void byte_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o);

/* Activations of INT8 are bytes where the CPU multiplies bytes, else all are 16-bit words. */
#if (defined(__AVX512VNNI__) && LANES == 16) || (defined(__AVXVNNI__) && LANES == 8)
#define INT8_BYTES 1
#else
#define INT8_BYTES 0
#endif
INLINE int activation_bytes(int form) { return form == INT8 && INT8_BYTES ? 1 : 2; }
INLINE int64_t activation_stride(const matrix *m) { return ((int64_t)m->inputs + 3) / 4 * 4; }
void quantise_row(const matrix *m, const float *x, void *to, float *scales, int32_t *sums);
