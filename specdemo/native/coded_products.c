/* Products of integers and codes, which have one scale per output and group, with activations that have one per row and
 * group. Weights are unsigned, four inputs per number of a vector; codes are replaced by integers of 16 bits. The sum
 * of EXACT products fits into 32 bits, so it does not depend on the order. */
#include "matrices.h"

/* Layouts of CODE4: that of other integers if an instruction looks words up, else one for two tables of bytes */
#if WORD_CODES
typedef struct {
    vi values; /* words, repeated: the upper bit of five is ignored */
} lookup;

INLINE lookup read_codes(const uint8_t *bytes) {
    lookup t;
    for (int i = 0; i < 32; i++) {
        uint16_t word = bytes[i % 16] | bytes[16 + i % 16] << 8;
        memcpy((char *)&t.values + 2 * i, &word, sizeof word);
    }
    return t;
}
INLINE vi look_up(const lookup *t, vi words) { /* by the lower four bits */
    return (vi)_mm512_permutexvar_epi16((__m512i)words, (__m512i)t->values);
}
#else
typedef struct {
    vb low, high;
} lookup; /* bytes of the 16 values, repeated every 16 bytes */

INLINE lookup read_codes(const uint8_t *bytes) {
    lookup t;
    for (int i = 0; i < 4 * LANES; i += 16)
        memcpy((char *)&t.low + i, bytes, 16), memcpy((char *)&t.high + i, bytes + 16, 16);
    return t;
}

/* table[index], and the values (low, high) of the lower and upper half of every 16 bytes */
#if defined(__AVX2__)
INLINE vb look_up(vb table, vb index) { return (vb)_mm256_shuffle_epi8((__m256i)table, (__m256i)index); }
INLINE vi lower(vb low, vb high) { return (vi)_mm256_unpacklo_epi8((__m256i)low, (__m256i)high); }
INLINE vi upper(vb low, vb high) { return (vi)_mm256_unpackhi_epi8((__m256i)low, (__m256i)high); }
#elif defined(__aarch64__)
INLINE vb look_up(vb table, vb index) { return (vb)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index); }
INLINE vi lower(vb low, vb high) { return (vi)vzip1q_u8((uint8x16_t)low, (uint8x16_t)high); }
INLINE vi upper(vb low, vb high) { return (vi)vzip2q_u8((uint8x16_t)low, (uint8x16_t)high); }
#else
INLINE vb look_up(vb table, vb index) {
    vb out;
    for (int i = 0; i < 4 * LANES; i++) out[i] = table[index[i]];
    return out;
}
INLINE vi half_of(vb low, vb high, int first) {
    vb out;
    for (int i = 0; i < 4 * LANES; i++) out[i] = (i % 2 ? high : low)[i / 16 * 16 + first + i % 16 / 2];
    return (vi)out;
}
INLINE vi lower(vb low, vb high) { return half_of(low, high, 0); }
INLINE vi upper(vb low, vb high) { return half_of(low, high, 8); }
#endif
#endif

#define CODED_ROWS (LANES == 16 ? 8 : 6) /* rows that share decoded weights */
#define WIDTH 2                          /* vectors of outputs decoded at once */
/* Rows that decode codes themselves: the tables occupy registers. */
#define LOOKUP_ROWS (WORD_CODES || SUMS / 3 > CODED_ROWS ? CODED_ROWS : SUMS / 3)
#define SIDE 2 /* rows multiplied in turn, so that more products are independent */

#if SPLIT
/* Add the products of a group and rows r to r + side: activations are 256 times their upper plus their lower bytes. */
INLINE void add_side(int form, int side, int r, const coded_slice *s, int64_t i, int64_t group,
                     const group_scales *scales, int first, const vi weight[QUADS][WIDTH], vf o[CODED_ROWS][VECTORS]) {
    const int quads = group_of(form) < EXACT ? group_of(form) / 4 : QUADS;
    vi lower[SIDE][WIDTH], upper[SIDE][WIDTH];
#pragma GCC unroll 2
    for (int n = 0; n < side; n++)
#pragma GCC unroll 2
        for (int v = 0; v < WIDTH; v++)
            lower[n][v] = start_of(form, s, (r + n) * s->groups + group), upper[n][v] = (vi){0};
#pragma GCC unroll 8
    for (int k = 0; k < quads; k++)
#pragma GCC unroll 2
        for (int n = 0; n < side; n++) {
            const int16_t *x = (const int16_t *)s->x + (r + n) * s->stride + i + 4 * k;
            vi lower_four = broadcast(x), upper_four = broadcast(x + 2);
#pragma GCC unroll 2
            for (int v = 0; v < WIDTH; v++) {
                lower[n][v] = multiply_bytes(lower[n][v], weight[k][v], lower_four);
                upper[n][v] = multiply_bytes(upper[n][v], weight[k][v], upper_four);
                HOLD(lower[n][v]);
                HOLD(upper[n][v]);
            }
        }
#pragma GCC unroll 2
    for (int n = 0; n < side; n++)
#pragma GCC unroll 2
        for (int v = 0; v < WIDTH; v++) {
            vi sum = (upper[n][v] << 8) + lower[n][v];
            vf *to = &o[r + n][first + v];
            *to = scaled(form, s, (r + n) * s->groups + group, scales, first + v, sum, *to);
            HOLD(*to); /* otherwise compilers delay the additions and run out of registers */
        }
}

INLINE void add_split(int form, int rows, const coded_slice *s, int64_t i, int64_t group, vf o[CODED_ROWS][VECTORS]) {
    const int quads = group_of(form) < EXACT ? group_of(form) / 4 : QUADS;
    const uint8_t *w = s->w + i * input_bytes(form);
    const group_scales scales = read_scales(form, s->scales + group * scale_bytes(form));
#pragma GCC unroll 4
    for (int first = 0; first < VECTORS; first += WIDTH) {
        vi weight[QUADS][WIDTH];
#pragma GCC unroll 8
        for (int k = 0; k < quads; k++)
#pragma GCC unroll 2
            for (int v = 0; v < WIDTH; v++) {
                const uint8_t *line = w + 4 * LANES * ((has_bytes(form) ? k : k / 2) * VECTORS + first + v);
                vu stored = load_stored(line);
                if (has_bytes(form) || k % 2 == 0) prefetch_far(line, sizeof stored);
                weight[k][v] = (vi)(has_bytes(form) ? stored : stored >> 4 * (k % 2) & 0x0f0f0f0f);
                HOLD(weight[k][v]);
            }
        const int side = rows > 5 ? SIDE : 1; /* gcc spills more vectors of 4 and 5 rows side by side */
#pragma GCC unroll 8
        for (int r = 0; r + side <= rows; r += side) add_side(form, side, r, s, i, group, &scales, first, weight, o);
        if (rows % side) add_side(form, 1, rows - 1, s, i, group, &scales, first, weight, o);
    }
}
#endif

/* Decode the step of inputs at p into pairs of words: inputs 0 and 2, 1 and 3 of every four. CODE4 without WORD_CODES:
 * 0 and 1, 2 and 3; the 16 bytes of four outputs contain two inputs of one vector, then of the next. */
INLINE void decode_words(int form, const uint8_t *p, const lookup *t, vi out[4 * VECTORS]) {
#if !WORD_CODES
    if (form == CODE4) {
        for (int v = 0; v < VECTORS; v += 2) {
            vb pairs;
            memcpy(&pairs, p + 2 * v * LANES, sizeof pairs);
            vb now = pairs & 15, next = (vb)((vw)pairs >> 4) & 15;
            vb low = look_up(t->low, now), high = look_up(t->high, now);
            out[v] = lower(low, high), out[v + 1] = upper(low, high);
            low = look_up(t->low, next), high = look_up(t->high, next);
            out[VECTORS + v] = lower(low, high), out[VECTORS + v + 1] = upper(low, high);
        }
        return;
    }
#endif
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        vu stored = load_stored(p + 4 * v * LANES);
#pragma GCC unroll 4
        for (int pair = 0; pair < step_of(form) / 2; pair++) {
            vu words = stored >> (8 * (pair % 2) + 4 * (pair / 2));
#if WORD_CODES
            if (form == CODE4) {
                out[pair * VECTORS + v] = look_up(t, (vi)words);
                continue;
            }
#endif
            out[pair * VECTORS + v] = (vi)(words & (has_bytes(form) ? 0x00ff00ff : 0x000f000f));
        }
    }
}

/* Add the products of a group, of words. */
INLINE void add_words(int form, int rows, int tiled, const coded_slice *s, const lookup *t, int64_t i, int64_t group,
                      vf o[CODED_ROWS][VECTORS]) {
    const int step = step_of(form), inputs = group_of(form) < EXACT ? group_of(form) : EXACT;
    const int16_t *x = (const int16_t *)s->x + i;
    vi sum[CODED_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[r][v] = start_of(form, s, r * s->groups + group);
#pragma GCC unroll 1
    for (int64_t k = 0; k < inputs; k += step, x += step) {
        vi decoded[4 * VECTORS];
        const vi *words = tiled ? s->tile + (i + k) / 2 * VECTORS : decoded;
        if (!tiled) decode_words(form, s->w + (i + k) * input_bytes(form), t, decoded);
#pragma GCC unroll 4
        for (int pair = 0; pair < step / 2; pair++) {
            vi weight[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                weight[v] = words[pair * VECTORS + v];
                HOLD(weight[v]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vi input = broadcast(x + r * s->stride + 2 * pair);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    sum[r][v] = multiply_pairs(sum[r][v], weight[v], input);
                    HOLD(sum[r][v]);
                }
            }
        }
    }
    const group_scales scales = read_scales(form, s->scales + group * scale_bytes(form));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            o[r][v] = scaled(form, s, r * s->groups + group, &scales, v, sum[r][v], o[r][v]);
            HOLD(o[r][v]);
        }
}

/* o[rows][UNIT] = o + products of a slice, in groups of inputs */
INLINE void coded_kernel(int form, int rows, int tiled, const coded_slice *s, const lookup *t, float *o) {
    const int inputs = group_of(form) < EXACT ? group_of(form) : EXACT;
    vf sum[CODED_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[r][v] = load(o + r * UNIT + v * LANES);
#pragma GCC unroll 1
    for (int64_t i = 0; i < s->count; i += inputs) {
        const int64_t group = i / group_of(form);
#if SPLIT
        if (form != CODE4) {
            prefetch_far(s->scales + group * scale_bytes(form), scale_bytes(form));
            add_split(form, rows, s, i, group, sum);
            continue;
        }
#endif
        if (!tiled) prefetch(s->w + i * input_bytes(form), inputs * input_bytes(form));
        prefetch(s->scales + group * scale_bytes(form), scale_bytes(form));
        add_words(form, rows, tiled, s, t, i, group, sum);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(o + r * UNIT + v * LANES, sum[r][v]);
}

INLINE void coded_kernels(int form, int rows, const coded_slice *s, const lookup *t, float *o) {
#define CODED_CASE(N)                                                                                                  \
    case N:                                                                                                            \
        if (form == CODE4 && s->tile)                                                                                  \
            coded_kernel(form, N, 1, s, t, o);                                                                         \
        else if (form != CODE4 || N <= LOOKUP_ROWS)                                                                    \
            coded_kernel(form, N, 0, s, t, o);                                                                         \
        break;
    switch (rows) {
        CODED_CASE(1)
        CODED_CASE(2)
        CODED_CASE(3)
        CODED_CASE(4)
        CODED_CASE(5)
        CODED_CASE(6)
#if LANES == 16
        CODED_CASE(7)
        CODED_CASE(8)
#endif
    }
}

/* Groups of rows share a strip of weights in the first cache; CODE4: decoded. Few rows need one strip. */
INLINE void coded_strips(int form, const coded_slice *block, const lookup *codes, int rows, float *o) {
    vi tile[STRIP / 2 * VECTORS];
    int parts = (rows + CODED_ROWS - 1) / CODED_ROWS;
    int is_single = rows <= (form == CODE4 ? LOOKUP_ROWS : CODED_ROWS);
    int64_t length = is_single ? block->count : STRIP;
    coded_slice s = *block;
    for (int64_t i = 0; i < block->count; i += length, s.w += length * input_bytes(form)) {
        s.count = block->count - i < length ? block->count - i : length;
        s.scales = block->scales + i / group_of(form) * scale_bytes(form);
        if (form == CODE4 && !is_single) {
            s.tile = tile;
            for (int64_t k = 0; k < s.count; k += step_of(form)) {
                __builtin_prefetch(s.w + (k + STRIP) * input_bytes(form));
                decode_words(form, s.w + k * input_bytes(form), codes, tile + k / 2 * VECTORS);
            }
        }
        for (int left = parts, r = 0, n; left; left--, r += n) {
            int64_t at = r * s.groups + i / group_of(form);
            n = (rows - r + left - 1) / left;
            s.x = (const int16_t *)block->x + r * s.stride + i;
            s.x_scales = block->x_scales + at, s.corrections = block->corrections + at;
            coded_kernels(form, n, &s, codes, o + r * UNIT);
        }
    }
}

INLINE void coded_product_of(int form, const matrix *m, int64_t first, int blocks, activations a, int rows, float *o) {
    lookup codes;
    if (form == CODE4) codes = read_codes(m->code_bytes);
    int64_t inputs = m->inputs, groups = inputs / group_of(form);
    for (int r = 0; r < rows; r++) memset(o + r * UNIT, 0, blocks * BLOCK * sizeof *o);
    for (int b = 0; b < blocks; b++) {
        const uint8_t *w = (const uint8_t *)m->weights + (first + b) * inputs * input_bytes(form);
        const char *scales = (const char *)m->scales + (first + b) * groups * scale_bytes(form);
        coded_slice s = {w, 0, scales, a.x, a.scales, a.corrections, inputs, inputs, groups};
        coded_strips(form, &s, &codes, rows, o + b * BLOCK);
    }
}

void coded_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o) {
    if (m->byte_inputs) {
        narrow_product(m, first, blocks, a, rows, o);
        return;
    }
    switch (m->form) {
    case CODE4: coded_product_of(CODE4, m, first, blocks, a, rows, o); break;
    case Q8_0: coded_product_of(Q8_0, m, first, blocks, a, rows, o); break;
    case Q4_0: coded_product_of(Q4_0, m, first, blocks, a, rows, o); break;
    case Q4_1: coded_product_of(Q4_1, m, first, blocks, a, rows, o); break;
    case Q4_K: coded_product_of(Q4_K, m, first, blocks, a, rows, o); break;
    default: coded_product_of(Q6_K, m, first, blocks, a, rows, o);
    }
}
