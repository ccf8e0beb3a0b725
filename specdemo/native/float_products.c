/* Products of float activations with float weights */
#include "matrices.h"

INLINE void decode(int form, const char *p, vf out[VECTORS]) {
    if (form != BF16) {
        for (int v = 0; v < VECTORS; v++) out[v] = load_as(form, p, v * LANES);
        return;
    }
    for (int v = 0; v < VECTORS; v += 2) { /* the weights of two vectors alternate */
        vu both;
        memcpy(&both, p + 2 * v * LANES, sizeof both);
        out[v] = (vf)(both << 16), out[v + 1] = (vf)(both & 0xffff0000);
    }
}

/* Products of float activations with `count` inputs of adjacent blocks, starting at w, added to o[rows][UNIT] */
typedef struct {
    const char *w;
    int64_t block_bytes, count;
} slice;

INLINE void kernel(int form, int rows, int blocks, const slice *s, const float *x, int64_t stride, float *o) {
    vf sum[TILE_ROWS][4 * VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < blocks * VECTORS; v++) sum[r][v] = load(o + r * UNIT + v * LANES);
    const char *w = s->w;
    for (int64_t i = 0; i < s->count; i++, w += input_bytes(form)) {
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) {
            vf weight[VECTORS];
            if (rows > 1) prefetch(w + b * s->block_bytes, 1);
            decode(form, w + b * s->block_bytes, weight);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) HOLD(weight[v]);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vf input = fill(x[r * stride + i]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sum[r][b * VECTORS + v] += weight[v] * input;
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < blocks * VECTORS; v++) store(o + r * UNIT + v * LANES, sum[r][v]);
}

/* One kernel per number of rows; narrow ones for the last blocks of a matrix. */
INLINE void kernels(int form, int rows, int blocks, const slice *s, const float *x, int64_t stride, float *o) {
#define CASE(N)                                                                                                        \
    case N:                                                                                                            \
        if (blocks == 1)                                                                                               \
            kernel(form, N, 1, s, x, stride, o);                                                                       \
        else                                                                                                           \
            kernel(form, N, FIT(N), s, x, stride, o);                                                                  \
        break;
    switch (rows) {
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
        CASE(5)
        CASE(6)
#if TILE_ROWS > 6
        CASE(7)
        CASE(8)
        CASE(9)
        CASE(10)
        CASE(11)
        CASE(12)
#endif
    }
}

/* Apart from `unit_product`, whose tables would occupy registers. */
static __attribute__((noinline)) void tile_kernels(int rows, int blocks, const slice *s, const float *x, int64_t stride,
                                                   float *o) {
    kernels(F32, rows, blocks, s, x, stride, o);
}

/* o[rows][UNIT] = x[rows][inputs] times `blocks` blocks. Many rows share weights decoded into a tile. */
INLINE void unit_product(int form, const matrix *m, int64_t first, int blocks, const float *x, int64_t stride, int rows,
                         float *o) {
    float tile[TILE_INPUTS * BLOCK] __attribute__((aligned(64)));
    int64_t bytes = m->inputs * input_bytes(form);
    int groups = (rows + TILE_ROWS - 1) / TILE_ROWS, tiled = form != F32 && groups > 2;
    int64_t length = groups > 1 ? TILE_INPUTS : m->inputs;
    for (int r = 0; r < rows; r++) memset(o + r * UNIT, 0, blocks * BLOCK * sizeof *o);
    for (int b = 0, width; b < blocks; b += width) {
        width = groups > 1 || b + FIT(rows) > blocks ? 1 : FIT(rows);
        for (int64_t start = 0; start < m->inputs; start += length) {
            slice s = {(const char *)m->weights + (first + b) * bytes + start * input_bytes(form), bytes,
                       m->inputs - start < length ? m->inputs - start : length};
            if (tiled) {
                for (int64_t i = 0; i < s.count; i++) {
                    vf weight[VECTORS];
                    prefetch(s.w + i * input_bytes(form), 1);
                    decode(form, s.w + i * input_bytes(form), weight);
                    for (int v = 0; v < VECTORS; v++) store(tile + i * BLOCK + v * LANES, weight[v]);
                }
                s.w = (const char *)tile;
            }
            for (int left = groups, r = 0, n; left; left--, r += n) {
                n = (rows - r + left - 1) / left;
                const float *inputs = x + r * stride + start;
                if (tiled)
                    tile_kernels(n, width, &s, inputs, stride, o + r * UNIT + b * BLOCK);
                else
                    kernels(form, n, width, &s, inputs, stride, o + r * UNIT + b * BLOCK);
            }
        }
    }
}

void float_product(const matrix *m, int64_t first, int blocks, const float *x, int64_t stride, int rows, float *o) {
    switch (m->form) {
    case F32: unit_product(F32, m, first, blocks, x, stride, rows, o); break;
    case BF16: unit_product(BF16, m, first, blocks, x, stride, rows, o); break;
    default: unit_product(F16, m, first, blocks, x, stride, rows, o);
    }
}
