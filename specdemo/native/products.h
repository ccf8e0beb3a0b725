/* Products of rows of activations and blocks of weights, for one unit of work: o[rows][UNIT] */
#pragma once
#include "formats.h"

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

/* Activations have 16 bits, in `narrow` matrices 8. Where the CPU multiplies bytes, those of INT8 have 8. With SPLIT,
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
