/* Products of INT8, which has one scale per output and one per row: integer sums over all inputs */
#include "products.h"

#define INT8_ROWS (SUMS / VECTORS < 6 ? SUMS / VECTORS : 6)
#define SUMS_OF_FEW (LANES == 16 ? 4 : 2)

/* Add the products of four inputs to independent sums of each row and vector. */
INLINE void add_quad(int rows, const char *x, int64_t quads, const uint8_t *w, vi sum[INT8_ROWS][VECTORS]) {
    const int64_t bytes = BYTE_PRODUCTS ? 4 : 8;
    prefetch_far(w, 4 * BLOCK);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        vu weight;
        memcpy(&weight, w + 4 * v * LANES, sizeof weight);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const char *four = x + r * quads * bytes;
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

/* o[rows][UNIT] = products of a block and rows of `quads` times four activations. Few rows have several sums, since
 * each product waits for the previous one of its sum. */
INLINE void int8_kernel(int rows, const char *x, int64_t quads, const uint8_t *w, const activations *a,
                        const float *scales, float *o) {
    const int64_t bytes = BYTE_PRODUCTS ? 4 : 8;
    const int sums = rows <= 2 ? SUMS_OF_FEW : 1;
    vi sum[SUMS_OF_FEW][INT8_ROWS][VECTORS];
#pragma GCC unroll 4
    for (int n = 0; n < sums; n++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[n][r][v] = (n ? 0 : a->corrections[r].offset) - (vi){0};
    int64_t k = 0;
#pragma GCC unroll 1
    for (; k + sums <= quads; k += sums)
#pragma GCC unroll 4
        for (int n = 0; n < sums; n++, w += 4 * BLOCK) add_quad(rows, x + (k + n) * bytes, quads, w, sum[n]);
#pragma GCC unroll 1
    for (; k < quads; k++, w += 4 * BLOCK) add_quad(rows, x + k * bytes, quads, w, sum[0]);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            vi all = sum[0][r][v];
#pragma GCC unroll 4
            for (int n = 1; n < sums; n++) all += sum[n][r][v];
            vf scale = a->scales[r] * load(scales + v * LANES);
            store(o + r * UNIT + v * LANES, __builtin_convertvector(all, vf) * scale);
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
