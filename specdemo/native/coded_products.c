/* Products of integers of 16 bits: CODE4 looks them up, the other forms contain them. Activations are integers with one
 * scale per row and group. The sum of EXACT products fits into 32 bits, so it does not depend on the order; INT8: any
 * sum. */
#include "lookup.h"
#include "products.h"

/* Rows that decode weights themselves: the tables of CODE4 occupy registers. */
#define CODED_ROWS(form) ((form) == CODE4 && SUMS / 3 < TILE_ROWS ? SUMS / 3 : TILE_ROWS)

typedef int16_t vs __attribute__((vector_size(4 * LANES)));

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

/* Words of vector v and a pair of inputs. Pairs of bytes: inputs 0 and 2, 1 and 3. */
INLINE vi stored_words(int form, const uint8_t *p, int v, int pair) {
    vu stored;
    memcpy(&stored, p + 4 * v * LANES, sizeof stored);
    if (has_bytes(form)) return (vi)(pair ? (vs)stored >> 8 : (vs)stored << 8 >> 8);
    return (vi)(stored >> 4 * pair & 0x000f000f);
}

/* Decode CODED_STEP inputs into pairs of words. CODE4: the 16 bytes of four outputs contain two inputs of one vector,
 * then of the next. Others: 4 bytes per output, see position. */
INLINE void decode_words(int form, const uint8_t *p, const lookup *t, vi out[4 * VECTORS]) {
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
    for (int pair = 0; pair < step_of(form) / 2; pair++)
        for (int v = 0; v < VECTORS; v++) out[pair * VECTORS + v] = stored_words(form, p, v, pair);
}

/* Inputs of a block */
typedef struct {
    const uint8_t *w;
    const vi *tile; /* decoded weights, or null */
    const void *scales;
    const int16_t *x;      /* [rows][stride] */
    const float *x_scales; /* [rows][groups] */
    const int32_t *x_sums; /* [rows][groups]; Q4_0, Q4_1, Q4_K */
    int64_t count, stride, groups;
} coded_slice;

/* o = o + sums times scales of a group */
INLINE void add_scaled(int form, int rows, const coded_slice *s, int64_t group, vi sum[TILE_ROWS][VECTORS], float *o) {
    vf scale[VECTORS], minimum[VECTORS];
    const int numbers = scale_form_of(form);
    const int64_t first = group * BLOCK * scales_of(form);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        scale[v] = load_as(numbers, s->scales, first + v * LANES);
        if (has_minimum(form)) minimum[v] = load_as(numbers, s->scales, first + BLOCK + v * LANES);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float x_scale = s->x_scales[r * s->groups + group];
        int32_t x_sum = offset_of(form) || has_minimum(form) ? s->x_sums[r * s->groups + group] : 0;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            float *at = o + r * UNIT + v * LANES;
            vi products = offset_of(form) ? sum[r][v] - offset_of(form) * x_sum : sum[r][v];
            vf next = load(at) + __builtin_convertvector(products, vf) * (scale[v] * x_scale);
            if (has_minimum(form)) next += minimum[v] * ((float)x_sum * x_scale);
            store(at, next);
        }
    }
}

/* o: sums of INT8 are integers */
INLINE void coded_kernel(int form, int rows, int tiled, const coded_slice *s, const lookup *t, float *o) {
    const int step = step_of(form), group = group_of(form);
    const int64_t length = !group ? s->count : group < EXACT ? group : EXACT;
    const uint8_t *w = s->w;
    const vi *tile = s->tile;
    const int16_t *x = s->x;
    for (int64_t i = 0; i < s->count; i += length) {
        vi sum[TILE_ROWS][VECTORS];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[r][v] = form == INT8 ? (vi)load(o + r * UNIT + v * LANES) : (vi){0};
#pragma GCC unroll 1
        for (int64_t k = 0; k < length; k += step, x += step) {
            vi decoded[4 * VECTORS];
            if (!tiled) prefetch(w);
            if (!tiled && form == CODE4) decode_words(form, w, t, decoded);
#pragma GCC unroll 4
            for (int pair = 0; pair < step / 2; pair++) {
                vi weight[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    weight[v] = tiled           ? tile[pair * VECTORS + v]
                                : form == CODE4 ? decoded[pair * VECTORS + v]
                                                : stored_words(form, w, v, pair);
                    HOLD(weight[v]);
                }
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) {
                    int32_t two;
                    memcpy(&two, x + r * s->stride + 2 * pair, sizeof two);
                    vi input = two - (vi){0};
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; v++) {
                        sum[r][v] = multiply_pairs(sum[r][v], weight[v], input);
                        HOLD(sum[r][v]); /* otherwise compilers delay the additions and run out of registers */
                    }
                }
            }
            if (tiled)
                tile += step / 2 * VECTORS;
            else
                w += step * input_bytes(form);
        }
        if (form != INT8) {
            add_scaled(form, rows, s, i / group, sum, o);
            continue;
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) store(o + r * UNIT + v * LANES, (vf)sum[r][v]);
    }
}

INLINE void coded_kernels(int form, int rows, const coded_slice *s, const lookup *t, float *o) {
#define CODED_CASE(N)                                                                                                  \
    case N:                                                                                                            \
        if (form == CODE4 && s->tile)                                                                                  \
            coded_kernel(form, N, 1, s, t, o);                                                                         \
        else if (N <= CODED_ROWS(form))                                                                                \
            coded_kernel(form, N, 0, s, t, o);                                                                         \
        break;
    switch (rows) {
        CODED_CASE(1)
        CODED_CASE(2)
        CODED_CASE(3)
        CODED_CASE(4)
        CODED_CASE(5)
        CODED_CASE(6)
#if TILE_ROWS > 6
        CODED_CASE(7)
        CODED_CASE(8)
        CODED_CASE(9)
        CODED_CASE(10)
        CODED_CASE(11)
        CODED_CASE(12)
#endif
    }
}

/* Groups of rows share a strip of weights in the first cache; CODE4: decoded. */
INLINE void coded_strips(int form, const coded_slice *block, int64_t group, const lookup *codes, int rows, float *o) {
    vi tile[STRIP / 2 * VECTORS];
    int parts = (rows + TILE_ROWS - 1) / TILE_ROWS;
    coded_slice s = *block;
    for (int64_t i = 0; i < block->count; i += STRIP, s.w += STRIP * input_bytes(form)) {
        s.count = block->count - i < STRIP ? block->count - i : STRIP;
        s.scales = (const char *)block->scales + i / group * scale_bytes(form);
        if (form == CODE4) {
            s.tile = tile;
            for (int64_t k = 0; k < s.count; k += step_of(form)) {
                __builtin_prefetch(s.w + (k + STRIP) * input_bytes(form));
                decode_words(form, s.w + k * input_bytes(form), codes, tile + k / 2 * VECTORS);
            }
        }
        for (int part = 0, r = 0, n; part < parts; part++, r += n) {
            int64_t at = r * s.groups + i / group;
            n = (rows - r + parts - part - 1) / (parts - part);
            s.x = block->x + r * s.stride + i, s.x_scales = block->x_scales + at, s.x_sums = block->x_sums + at;
            coded_kernels(form, n, &s, codes, o + r * UNIT);
        }
    }
}

INLINE void coded_product_of(int form, const matrix *m, int64_t first, int blocks, activations a, int rows, float *o) {
    lookup codes;
    if (form == CODE4) codes = read_codes(m->code_bytes);
    int64_t inputs = activation_stride(m), group = group_inputs(m), groups = m->inputs / group;
    for (int r = 0; r < rows; r++) memset(o + r * UNIT, 0, blocks * BLOCK * sizeof *o);
    for (int b = 0; b < blocks; b++) {
        const uint8_t *w = (const uint8_t *)m->weights + (first + b) * inputs * input_bytes(form);
        const char *scales = (const char *)m->scales + (first + b) * groups * scale_bytes(form);
        coded_slice s = {w, 0, scales, a.x, a.scales, a.sums, inputs, inputs, groups};
        if (rows <= CODED_ROWS(form))
            coded_kernels(form, rows, &s, &codes, o + b * BLOCK);
        else
            coded_strips(form, &s, group, &codes, rows, o + b * BLOCK);
    }
    for (int r = 0; form == INT8 && r < rows; r++)
        for (int j = 0; j < blocks * BLOCK; j += LANES) {
            float *at = o + r * UNIT + j;
            vf scale = load((const float *)m->scales + first * BLOCK + j);
            store(at, __builtin_convertvector((vi)load(at), vf) * (a.scales[r] * scale));
        }
}

void coded_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o) {
    switch (m->form) {
    case INT8: coded_product_of(INT8, m, first, blocks, a, rows, o); break;
    case CODE4: coded_product_of(CODE4, m, first, blocks, a, rows, o); break;
    case Q8_0: coded_product_of(Q8_0, m, first, blocks, a, rows, o); break;
    case Q4_0: coded_product_of(Q4_0, m, first, blocks, a, rows, o); break;
    case Q4_1: coded_product_of(Q4_1, m, first, blocks, a, rows, o); break;
    case Q4_K: coded_product_of(Q4_K, m, first, blocks, a, rows, o); break;
    default: coded_product_of(Q6_K, m, first, blocks, a, rows, o);
    }
}
