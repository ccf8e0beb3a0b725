/* Products of bytes: INT8 with the instructions for neural networks */
#include "products.h"

#if INT8_BYTES
#define INT8_ROWS (SUMS / VECTORS / 2)

/* sum + products of four unsigned and four signed bytes per number */
INLINE vi multiply_quads(vi sum, vi x, vi w) {
#if LANES == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)w);
#endif
}

INLINE void int8_kernel(int rows, int blocks, const int8_t *x, int64_t stride, const int8_t *w, int64_t quads,
                        int32_t *sums) {
    vi sum[INT8_ROWS][4 * VECTORS];
    memset(sum, 0, sizeof sum);
    for (int64_t k = 0; k < quads; k++)
#pragma GCC unroll 16
        for (int v = 0; v < blocks * VECTORS; v++) {
            vi weight;
            memcpy(&weight, w + ((v / VECTORS * quads + k) * BLOCK + v % VECTORS * LANES) * 4, sizeof weight);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                uint32_t four;
                memcpy(&four, x + r * stride + 4 * k, 4);
                vi input = (int32_t)(four ^ 0x80808080u) - (vi){0}; /* + 128: the instruction needs unsigned inputs */
                sum[r][v] = multiply_quads(sum[r][v], input, weight);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < blocks * VECTORS; v++) memcpy(sums + r * UNIT + v * LANES, &sum[r][v], sizeof sum[r][v]);
}

void byte_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o) {
    const float *scales = m->scales;
    int64_t quads = (m->inputs + 3) / 4, stride = quads * 4;
    int32_t sums[INT8_ROWS * UNIT];
    for (int r = 0, n; r < rows; r += n) {
        n = rows - r < INT8_ROWS ? rows - r : INT8_ROWS;
        const int8_t *inputs = (const int8_t *)a.x + r * stride;
        for (int b = 0, width; b < blocks; b += width) {
            const int8_t *w = (const int8_t *)m->weights + (first + b) * quads * BLOCK * 4;
            width = b + FIT(n) <= blocks ? FIT(n) : 1;
            switch (n) {
#define MOST(N) ((N) < INT8_ROWS ? (N) : INT8_ROWS)
#define INT8_CASE(N)                                                                                                   \
    case N:                                                                                                            \
        if (N > INT8_ROWS) break;                                                                                      \
        if (width == 1)                                                                                                \
            int8_kernel(MOST(N), 1, inputs, stride, w, quads, sums + b * BLOCK);                                       \
        else                                                                                                           \
            int8_kernel(MOST(N), FIT(N), inputs, stride, w, quads, sums + b * BLOCK);                                  \
        break;
                INT8_CASE(1)
                INT8_CASE(2)
                INT8_CASE(3)
                INT8_CASE(4)
                INT8_CASE(5)
                INT8_CASE(6)
            }
        }
        for (int i = 0; i < n; i++)
            for (int j = 0; j < blocks * BLOCK; j++) {
                int64_t output = first * BLOCK + j;
                o[(r + i) * UNIT + j] =
                    (float)(sums[i * UNIT + j] - 128 * m->sums[output]) * (a.scales[r + i] * scales[output]);
            }
    }
}
#else
void byte_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o) {
    coded_product(m, first, blocks, a, rows, o);
}
#endif
