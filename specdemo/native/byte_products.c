/* Products of weights and activations of 8 bits: INT8, and integers of GGUF files */
#include "matrices.h"

/* INT8, which has one scale per output and one per row: integer sums over all inputs */

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

/* Integers of GGUF files and activations of 8 bits, which have one scale per row and group. Weights are unsigned, four
 * inputs per number of a vector. */

#define NARROW_ROWS (LANES == 16 ? 8 : 6) /* rows that share decoded weights */
/* Products of four bits and bytes of a group are added in 16 bits, which is faster without an instruction for four. */
#if !BYTE_PRODUCTS && (LANES == 16 || defined(__AVX2__))
#define SHORT_SUMS 1
#else
#define SHORT_SUMS 0
#endif

#if SHORT_SUMS && LANES == 16
INLINE vi add_short(vi sum, vi w, vi x) { return (vi)((vs)sum + (vs)_mm512_maddubs_epi16((__m512i)w, (__m512i)x)); }
#elif SHORT_SUMS
INLINE vi add_short(vi sum, vi w, vi x) { return (vi)((vs)sum + (vs)_mm256_maddubs_epi16((__m256i)w, (__m256i)x)); }
#else
INLINE vi add_short(vi sum, vi w, vi x) { return multiply_bytes(sum, w, x); }
#endif

/* o = o + products of a group */
INLINE void add_group(int form, int rows, const coded_slice *s, int64_t i, int64_t group, vf o[NARROW_ROWS][VECTORS]) {
    const int quads = group_of(form) < EXACT ? group_of(form) / 4 : QUADS, is_short = SHORT_SUMS && !has_bytes(form);
    const uint8_t *w = s->w + i * input_bytes(form);
    const int8_t *x = (const int8_t *)s->x + i;
    vi sum[NARROW_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[r][v] = is_short ? (vi){0} : start_of(form, s, r * s->groups + group);
#pragma GCC unroll 8
    for (int k = 0; k < quads; k++) {
        vi weight[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const int line = has_bytes(form) ? k : k / 2;
            vu stored = load_stored(w + 4 * LANES * (line * VECTORS + v));
            weight[v] = (vi)(has_bytes(form) ? stored : stored >> 4 * (k % 2) & 0x0f0f0f0f);
            HOLD(weight[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vi four = broadcast(x + r * s->stride + 4 * k);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                sum[r][v] =
                    is_short ? add_short(sum[r][v], weight[v], four) : multiply_bytes(sum[r][v], weight[v], four);
                HOLD(sum[r][v]);
            }
        }
    }
    const group_scales scales = read_scales(form, s->scales + group * scale_bytes(form));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const int64_t at = r * s->groups + group;
            vi all = sum[r][v];
            if (is_short) all = multiply_pairs(start_of(form, s, at), all, 0x00010001 - (vi){0});
            o[r][v] = scaled(form, s, at, &scales, v, all, o[r][v]);
            HOLD(o[r][v]);
        }
}

/* o[rows][UNIT] = o + products of a slice */
INLINE void narrow_kernel(int form, int rows, const coded_slice *s, float *o) {
    const int inputs = group_of(form) < EXACT ? group_of(form) : EXACT;
    vf sum[NARROW_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[r][v] = load(o + r * UNIT + v * LANES);
#pragma GCC unroll 1
    for (int64_t i = 0; i < s->count; i += inputs) {
        const int64_t group = i / group_of(form);
        prefetch(s->w + i * input_bytes(form), inputs * input_bytes(form));
        prefetch(s->scales + group * scale_bytes(form), scale_bytes(form));
        add_group(form, rows, s, i, group, sum);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(o + r * UNIT + v * LANES, sum[r][v]);
}

INLINE void narrow_kernels(int form, int rows, const coded_slice *s, float *o) {
#define NARROW_CASE(N)                                                                                                 \
    case N: narrow_kernel(form, N, s, o); break;
    switch (rows) {
        NARROW_CASE(1)
        NARROW_CASE(2)
        NARROW_CASE(3)
        NARROW_CASE(4)
        NARROW_CASE(5)
        NARROW_CASE(6)
#if LANES == 16
        NARROW_CASE(7)
        NARROW_CASE(8)
#endif
    }
}

/* Groups of rows share a strip of weights in the first cache. */
INLINE void narrow_product_of(int form, const matrix *m, int64_t first, int blocks, activations a, int rows, float *o) {
    int64_t inputs = m->inputs, groups = inputs / group_of(form);
    int parts = (rows + NARROW_ROWS - 1) / NARROW_ROWS;
    int64_t length = parts == 1 ? inputs : STRIP;
    for (int r = 0; r < rows; r++) memset(o + r * UNIT, 0, blocks * BLOCK * sizeof *o);
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t i = 0; i < inputs; i += length) {
            const uint8_t *w = (const uint8_t *)m->weights + ((first + b) * inputs + i) * input_bytes(form);
            int64_t group = i / group_of(form);
            const char *scales = (const char *)m->scales + ((first + b) * groups + group) * scale_bytes(form);
            coded_slice s = {w, 0, scales, 0, 0, 0, inputs - i < length ? inputs - i : length, inputs, groups};
            for (int left = parts, r = 0, n; left; left--, r += n) {
                n = (rows - r + left - 1) / left;
                s.x = (const int8_t *)a.x + r * inputs + i;
                s.x_scales = a.scales + r * groups + group, s.corrections = a.corrections + r * groups + group;
                narrow_kernels(form, n, &s, o + r * UNIT + b * BLOCK);
            }
        }
}

void narrow_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o) {
    switch (m->form) {
    case Q8_0: narrow_product_of(Q8_0, m, first, blocks, a, rows, o); break;
    case Q4_0: narrow_product_of(Q4_0, m, first, blocks, a, rows, o); break;
    case Q4_1: narrow_product_of(Q4_1, m, first, blocks, a, rows, o); break;
    case Q4_K: narrow_product_of(Q4_K, m, first, blocks, a, rows, o); break;
    default: narrow_product_of(Q6_K, m, first, blocks, a, rows, o);
    }
}
