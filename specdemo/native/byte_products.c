/* Products of INT8, which has one scale per output and one per row: integer sums over all inputs */
#include "products.h"

#define INT8_ROWS (SUMS / VECTORS < 6 ? SUMS / VECTORS : 6)

/* o[rows][UNIT] = products of a block and rows of `quads` times four activations, of `bytes` bytes each */
INLINE void int8_kernel(int rows, const char *x, int64_t quads, const uint8_t *w, const activations *a,
                        const float *scales, float *o) {
    const int64_t bytes = BYTE_PRODUCTS ? 4 : 8;
    vi sum[INT8_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[r][v] = a->corrections[r].offset - (vi){0};
#pragma GCC unroll 1
    for (int64_t k = 0; k < quads; k++, w += 4 * BLOCK) {
        prefetch_far(w, 4 * BLOCK);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            vu weight;
            memcpy(&weight, w + 4 * v * LANES, sizeof weight);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const char *four = x + (r * quads + k) * bytes;
#if BYTE_PRODUCTS
                sum[r][v] = multiply_bytes(sum[r][v], (vi)weight, broadcast(four));
#else
                sum[r][v] = multiply_pairs(sum[r][v], (vi)(weight & 0x00ff00ff), broadcast(four));
                sum[r][v] = multiply_pairs(sum[r][v], (vi)(weight >> 8 & 0x00ff00ff), broadcast(four + 4));
#endif
                HOLD(sum[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            vf scale = a->scales[r] * load(scales + v * LANES);
            store(o + r * UNIT + v * LANES, __builtin_convertvector(sum[r][v], vf) * scale);
        }
}

void byte_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o) {
    int64_t quads = activation_stride(m) / 4;
    int parts = (rows + INT8_ROWS - 1) / INT8_ROWS;
    for (int n; parts; parts--, rows -= n, o += n * UNIT) {
        n = (rows + parts - 1) / parts;
        for (int b = 0; b < blocks; b++) {
            const uint8_t *w = (const uint8_t *)m->weights + (first + b) * quads * BLOCK * 4;
            const float *scales = (const float *)m->scales + (first + b) * BLOCK;
            switch (n) {
#define INT8_CASE(N)                                                                                                   \
    case N:                                                                                                            \
        if (N <= INT8_ROWS) int8_kernel(N, a.x, quads, w, &a, scales, o + b * BLOCK);                                  \
        break;
                INT8_CASE(1)
                INT8_CASE(2)
                INT8_CASE(3)
                INT8_CASE(4)
                INT8_CASE(5)
                INT8_CASE(6)
            }
        }
        a.x = (const char *)a.x + n * quads * 4 * activation_bytes(m);
        a.scales += n, a.corrections += n;
    }
}
