/* Forward pass of a decoder on a CPU: one call per pass, any number of rows.
 *
 * Batch invariance: every output of a row is computed by the same operations in the same order for any number of rows
 * and threads. Matrices are stored in blocks of outputs, [n / BLOCK][k][BLOCK]; each sum is accumulated over k in ascending
 * order. Attention visits the visible keys of a row in the order of the text.
 *
 * Work is divided into phases of chunks, claimed with atomic tickets; the thread that completes the last chunk of a phase
 * executes its serial part and opens the next phase. No thread waits for one that has no chunk.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>
#include "interface.h"
#include "sampling.h"
#include "vectors.h"

#if LANES == 16
#define VECTORS 2 /* per block of outputs */
#define TILE_ROWS 12
#define SUMS 24 /* vectors of sums that fit into registers */
#elif LANES == 8
#define VECTORS 2
#define TILE_ROWS 6
#define SUMS 12
#elif defined(__aarch64__)
#define VECTORS 4
#define TILE_ROWS 6
#define SUMS 24
#else
#define VECTORS 2
#define TILE_ROWS 6
#define SUMS 12
#endif
#define BLOCK (VECTORS * LANES)
#define UNIT_BLOCKS 4 /* blocks per unit of work */
#define UNIT (UNIT_BLOCKS * BLOCK)
#define TILE_INPUTS 64
#define EXACT 32 /* inputs per exact sum of products of 16-bit integers */
#define STRIP 128 /* inputs decoded at once for many rows */
/* Blocks whose sums of `rows` rows fit into registers with the inputs. */
#define FIT(rows) ((rows) * 4 * VECTORS < SUMS ? 4 : (rows) * 2 * VECTORS < SUMS ? 2 : 1)
#define SHARED_KEYS 32
#define HEAD_TILE (SUMS / 4) /* query heads whose sums fit into registers */
#define CHUNK_BYTES (96 << 10)
/* Distances in bytes at which weights are prefetched into the first and the second cache, because hardware prefetches too little
 * during other work. */
#define AHEAD 512
#define FAR_AHEAD 8192
#define MAX_THREADS 64
#define SPINS 8000 /* about 0.2 ms, longer than a decoding step without its passes */
#define YIELD 256 /* spins between calls of sched_yield() */

typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int8_t vc __attribute__((vector_size(LANES)));
typedef uint64_t vq __attribute__((vector_size(4 * LANES)));
typedef uint8_t vb __attribute__((vector_size(4 * LANES)));
typedef uint16_t vw __attribute__((vector_size(4 * LANES)));

/* Vectors */

INLINE vf load_bf16(const uint16_t *p) { vh h; memcpy(&h, p, sizeof h); return (vf)(__builtin_convertvector(h, vu) << 16); }
INLINE vf load_f16(const uint16_t *p) {
#if LANES == 16
    __m256i packed; memcpy(&packed, p, sizeof packed);
    return (vf)_mm512_cvtph_ps(packed);
#elif defined(__F16C__) && defined(__AVX__)
    __m128i packed; memcpy(&packed, p, sizeof packed);
    return (vf)_mm256_cvtph_ps(packed);
#else
    vh h; memcpy(&h, p, sizeof h);
    vu u = __builtin_convertvector(h, vu);
    vf magnitude = (vf)((u & 0x7fff) << 13) * 0x1p112f; /* exact, also for subnormal numbers */
    return (vf)((vu)magnitude | (u & 0x8000) << 16);
#endif
}
INLINE vf hyperbolic_tangent(vf x) { /* Cephes' tanhf */
    vf size = larger(x, -x), z = x * x, p = fill(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f, p = p * z - 5.37397155531e-2f, p = p * z + 1.33314422036e-1f;
    p = (p * z - 3.33332819422e-1f) * z * x + x;
    vf q = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
    return choose(x == x, choose(size < 0.625f, p, choose(x < 0.0f, -q, q)), x);
}
INLINE vf normal_cdf(vf x) { /* erfc(-x / sqrt(2)) / 2; relative error 2e-7 (Numerical Recipes, erfcc) */
    vf z = larger(x, -x) * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z), p = fill(0.17087277f);
    p = p * t - 0.82215223f, p = p * t + 1.48851587f, p = p * t - 1.13520398f, p = p * t + 0.27886807f;
    p = p * t - 0.18628806f, p = p * t + 0.09678418f, p = p * t + 0.37409196f, p = p * t + 1.00002368f;
    vf tail = 0.5f * t * exponential(p * t - 1.26551223f - z * z);
    return choose(x < 0.0f, tail, 1.0f - tail);
}
INLINE vf activate(int kind, vf x) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == GELU_TANH) return x / (1.0f + exponential(x * (-1.59576912f - 0.0713548163f * x * x)));
    return x * normal_cdf(x);
}
static void cap(float *x, int64_t whole, float limit) { /* whole: multiple of LANES */
    for (int64_t i = 0; i < whole; i += LANES) store(x + i, limit * hyperbolic_tangent(load(x + i) / limit));
}
INLINE vf load_as(int form, const void *base, int64_t i) {
    if (form == F32) return load((const float *)base + i);
    if (form == BF16) return load_bf16((const uint16_t *)base + i);
    return load_f16((const uint16_t *)base + i);
}
static uint16_t to_bf16(float x) {
    uint32_t u; memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* Decoding of weights into vectors */

INLINE void prefetch(const void *weights) {
    __builtin_prefetch((const char *)weights + FAR_AHEAD, 0, 2);
    __builtin_prefetch((const char *)weights + AHEAD);
}
INLINE int64_t input_bytes(int form) { /* of a block */
    switch (form) {
    case F32: return 4 * BLOCK;
    case BF16: case F16: return 2 * BLOCK;
    case INT8: case Q8_0: case Q6_K: return BLOCK;
    default: return BLOCK / 2;
    }
}
INLINE void decode(int form, const char *p, vf out[VECTORS]) {
    if (form != BF16) {
        for (int v = 0; v < VECTORS; v++) out[v] = load_as(form, p, v * LANES);
        return;
    }
    for (int v = 0; v < VECTORS; v += 2) { /* the weights of two vectors alternate */
        vu both; memcpy(&both, p + 2 * v * LANES, sizeof both);
        out[v] = (vf)(both << 16), out[v + 1] = (vf)(both & 0xffff0000);
    }
}
/* Index in `weights` of input k and output n, in numbers or bytes; `shift`: first bit in the byte */
static int64_t position(const matrix *m, int64_t n, int64_t k, int *shift) {
    int64_t b = n / BLOCK, j = n % BLOCK, inputs = m->inputs;
    *shift = 0;
    switch (m->form) {
    case BF16: j = j / (2 * LANES) * 2 * LANES + j % LANES * 2 + j / LANES % 2; break;
    case INT8: case Q8_0: case Q6_K: return (b * ((inputs + 3) / 4) + k / 4) * 4 * BLOCK + 4 * j + k % 4;
    case CODE4:
        *shift = 4 * (k / 2 % 2);
        return (b * inputs + k / 4 * 4) * BLOCK / 2 + j / (2 * LANES) * 4 * LANES + j % LANES / 4 * 16 + j / LANES % 2 * 8 + j % 4 * 2 + k % 2;
    case Q4_0: case Q4_1: case Q4_K:
        *shift = 4 * (k / 2 % 2);
        return (b * inputs + k / 8 * 8) * BLOCK / 2 + 4 * j + k % 2 * 2 + k / 4 % 2;
    }
    return (b * inputs + k) * BLOCK + j;
}
static float read_number(int form, const void *numbers, int64_t i) {
    if (form == F32) return ((const float *)numbers)[i];
    uint16_t copies[LANES];
    for (int lane = 0; lane < LANES; lane++) copies[lane] = ((const uint16_t *)numbers)[i];
    return load_as(form, copies, 0)[0];
}
static float weight_of(const matrix *m, int64_t n, int64_t k) {
    int shift;
    int64_t at = position(m, n, k, &shift), b = n / BLOCK, j = n % BLOCK;
    if (m->form <= F16) return read_number(m->form, m->weights, at);
    int byte = ((const uint8_t *)m->weights)[at], code = byte >> shift & 15;
    if (m->form == INT8) return (int8_t)byte * read_number(F32, m->scales, n);
    if (m->form == CODE4) return m->codes[code] * read_number(F32, m->scales, (b * (m->inputs / 64) + k / 64) * BLOCK + j);
    int64_t group = b * (m->inputs / EXACT) + k / EXACT;
    if (m->form == Q8_0) return (int8_t)byte * read_number(F16, m->scales, group * BLOCK + j);
    if (m->form == Q4_0) return (code - 8) * read_number(F16, m->scales, group * BLOCK + j);
    if (m->form == Q6_K) return (int8_t)byte * read_number(F32, m->scales, (b * (m->inputs / 16) + k / 16) * BLOCK + j);
    int numbers = m->form == Q4_K ? F32 : F16;
    return code * read_number(numbers, m->scales, 2 * group * BLOCK + j) + read_number(numbers, m->scales, (2 * group + 1) * BLOCK + j);
}

/* Keep a vector in a register: compilers read it from memory again for each product. */
#if defined(__x86_64__)
#define HOLD(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define HOLD(v) __asm__("" : "+w"(v))
#else
#define HOLD(v) (void)(v)
#endif

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
            if (rows > 1) prefetch(w + b * s->block_bytes);
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
#define CASE(N) case N: if (blocks == 1) kernel(form, N, 1, s, x, stride, o); else kernel(form, N, FIT(N), s, x, stride, o); break;
    switch (rows) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE_ROWS > 6
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

/* Apart from `unit_product`, whose tables would occupy registers. */
static __attribute__((noinline)) void tile_kernels(int rows, int blocks, const slice *s, const float *x, int64_t stride, float *o) {
    kernels(F32, rows, blocks, s, x, stride, o);
}

/* o[rows][UNIT] = x[rows][inputs] times `blocks` blocks. Many rows share weights decoded into a tile. */
INLINE void unit_product(int form, const matrix *m, int64_t first, int blocks, const float *x, int64_t stride, int rows, float *o) {
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
                    prefetch(s.w + i * input_bytes(form));
                    decode(form, s.w + i * input_bytes(form), weight);
                    for (int v = 0; v < VECTORS; v++) store(tile + i * BLOCK + v * LANES, weight[v]);
                }
                s.w = (const char *)tile;
            }
            for (int g = 0, r = 0; g < groups; g++) {
                int n = (rows - r + groups - g - 1) / (groups - g);
                const float *inputs = x + r * stride + start;
                if (tiled) tile_kernels(n, width, &s, inputs, stride, o + r * UNIT + b * BLOCK);
                else kernels(form, n, width, &s, inputs, stride, o + r * UNIT + b * BLOCK);
                r += n;
            }
        }
    }
}

/* Products of integers of 16 bits: CODE4 looks them up, the other forms contain them. Activations are integers with one scale
 * per row and group. The sum of EXACT products fits into 32 bits, so it does not depend on the order; INT8: any sum. */

#define CODE_PEAK 32767
/* Rows that decode weights themselves: the tables of CODE4 occupy registers. */
#define CODED_ROWS(form) ((form) == CODE4 && SUMS / 3 < TILE_ROWS ? SUMS / 3 : TILE_ROWS)
#define CODED_STEP(form) ((form) >= Q4_0 && (form) <= Q4_K ? 8 : 4) /* inputs decoded at once */

/* LLM.int8() without outliers (2208.07339) has one scale per row, other forms one per group. */
INLINE int64_t group_inputs(const matrix *m) { return m->form == INT8 ? m->inputs : m->form == CODE4 ? 64 : m->form == Q6_K ? 16 : EXACT; }
INLINE int activation_peak(int form) { return form == INT8 ? 127 : form == CODE4 ? 2047 : 32767; }

typedef int16_t vs __attribute__((vector_size(4 * LANES)));
typedef struct { vb low, high; } lookup; /* bytes of the 16 values, repeated every 16 bytes */

static float code_peak(const float *codes) {
    float peak = 0;
    for (int c = 0; c < 16; c++) peak = fabsf(codes[c]) > peak ? fabsf(codes[c]) : peak;
    return peak;
}
/* Store the bytes of the integers nearest to the codes, scaled to CODE_PEAK. */
void set_code_bytes(const float *codes, uint8_t *bytes) {
    for (int c = 0; c < 16; c++) {
        int value = (int)lrintf(codes[c] * (CODE_PEAK / code_peak(codes)));
        bytes[c] = (uint8_t)value, bytes[16 + c] = (uint8_t)(value >> 8);
    }
}
INLINE lookup read_codes(const uint8_t *bytes) {
    lookup t;
    for (int i = 0; i < 4 * LANES; i += 16) memcpy((char *)&t.low + i, bytes, 16), memcpy((char *)&t.high + i, bytes + 16, 16);
    return t;
}

/* table[index], and the values (low, high) of the lower and upper half of every 16 bytes */
#if LANES == 16
INLINE vb look_up(vb table, vb index) { return (vb)_mm512_shuffle_epi8((__m512i)table, (__m512i)index); }
INLINE vi lower(vb low, vb high) { return (vi)_mm512_unpacklo_epi8((__m512i)low, (__m512i)high); }
INLINE vi upper(vb low, vb high) { return (vi)_mm512_unpackhi_epi8((__m512i)low, (__m512i)high); }
#elif defined(__AVX2__)
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

INLINE vi multiply_pairs(vi sum, vi w, vi x) { /* pairs of 16-bit integers */
#if defined(__AVX512VNNI__) && LANES == 16
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif LANES == 16
    return sum + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x);
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
    vu stored; memcpy(&stored, p + 4 * v * LANES, sizeof stored);
    if (input_bytes(form) == BLOCK) return (vi)(pair ? (vs)stored >> 8 : (vs)stored << 8 >> 8);
    return (vi)(stored >> 4 * pair & 0x000f000f);
}

/* Decode CODED_STEP inputs into pairs of words. CODE4: the 16 bytes of four outputs contain two inputs of one vector, then of
 * the next. Others: 4 bytes per output, see position. */
INLINE void decode_words(int form, const uint8_t *p, const lookup *t, vi out[4 * VECTORS]) {
    if (form == CODE4) {
        for (int v = 0; v < VECTORS; v += 2) {
            vb pairs; memcpy(&pairs, p + 2 * v * LANES, sizeof pairs);
            vb now = pairs & 15, next = (vb)((vw)pairs >> 4) & 15;
            vb low = look_up(t->low, now), high = look_up(t->high, now);
            out[v] = lower(low, high), out[v + 1] = upper(low, high);
            low = look_up(t->low, next), high = look_up(t->high, next);
            out[VECTORS + v] = lower(low, high), out[VECTORS + v + 1] = upper(low, high);
        }
        return;
    }
    for (int pair = 0; pair < CODED_STEP(form) / 2; pair++)
        for (int v = 0; v < VECTORS; v++) out[pair * VECTORS + v] = stored_words(form, p, v, pair);
}

/* Inputs of a block */
typedef struct {
    const uint8_t *w;
    const vi *tile;        /* decoded weights, or null */
    const void *scales;
    const int16_t *x;      /* [rows][stride] */
    const float *x_scales; /* [rows][groups] */
    const int32_t *x_sums; /* [rows][groups]; Q4_0, Q4_1, Q4_K */
    int64_t count, stride, groups;
} coded_slice;

/* o = o + sums times scales of a group */
INLINE void add_scaled(int form, int rows, const coded_slice *s, int64_t group, vi sum[TILE_ROWS][VECTORS], float *o) {
    vf scale[VECTORS], minimum[VECTORS];
    const int numbers = form == CODE4 || form >= Q4_K ? F32 : F16, has_minimum = form == Q4_1 || form == Q4_K;
    const int64_t first = group * BLOCK * (has_minimum ? 2 : 1);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        scale[v] = load_as(numbers, s->scales, first + v * LANES);
        if (has_minimum) minimum[v] = load_as(numbers, s->scales, first + BLOCK + v * LANES);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float x_scale = s->x_scales[r * s->groups + group];
        int32_t x_sum = form >= Q4_0 ? s->x_sums[r * s->groups + group] : 0;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            float *at = o + r * UNIT + v * LANES;
            vi products = form == Q4_0 ? sum[r][v] - 8 * x_sum : sum[r][v];
            vf next = load(at) + __builtin_convertvector(products, vf) * (scale[v] * x_scale);
            if (has_minimum) next += minimum[v] * ((float)x_sum * x_scale);
            store(at, next);
        }
    }
}

/* o: sums of INT8 are integers */
INLINE void coded_kernel(int form, int rows, int tiled, const coded_slice *s, const lookup *t, float *o) {
    const int step = CODED_STEP(form);
    const int64_t length = form == INT8 ? s->count : form == Q6_K ? 16 : EXACT;
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
                    weight[v] = tiled ? tile[pair * VECTORS + v] : form == CODE4 ? decoded[pair * VECTORS + v] : stored_words(form, w, v, pair);
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
            if (tiled) tile += step / 2 * VECTORS;
            else w += step * input_bytes(form);
        }
        if (form != INT8) { add_scaled(form, rows, s, i / (form == CODE4 ? 64 : length), sum, o); continue; }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) store(o + r * UNIT + v * LANES, (vf)sum[r][v]);
    }
}

INLINE void coded_kernels(int form, int rows, const coded_slice *s, const lookup *t, float *o) {
#define CODED_CASE(N) \
    case N: \
        if (form == CODE4 && s->tile) coded_kernel(form, N, 1, s, t, o); \
        else if (N <= CODED_ROWS(form)) coded_kernel(form, N, 0, s, t, o); \
        break;
    switch (rows) {
    CODED_CASE(1) CODED_CASE(2) CODED_CASE(3) CODED_CASE(4) CODED_CASE(5) CODED_CASE(6)
#if TILE_ROWS > 6
    CODED_CASE(7) CODED_CASE(8) CODED_CASE(9) CODED_CASE(10) CODED_CASE(11) CODED_CASE(12)
#endif
    }
}

/* Quantised activations: numbers, and scales and sums of the groups */
typedef struct {
    const void *x;
    const float *scales;
    const int32_t *sums;
} activations;

/* Groups of rows share a strip of weights in the first cache; CODE4: decoded. */
INLINE void coded_strips(int form, const coded_slice *block, int64_t group, int64_t scale_bytes, const lookup *codes, int rows, float *o) {
    vi tile[STRIP / 2 * VECTORS];
    int parts = (rows + TILE_ROWS - 1) / TILE_ROWS;
    coded_slice s = *block;
    for (int64_t i = 0; i < block->count; i += STRIP, s.w += STRIP * input_bytes(form)) {
        s.count = block->count - i < STRIP ? block->count - i : STRIP;
        s.scales = (const char *)block->scales + i / group * scale_bytes;
        if (form == CODE4) {
            s.tile = tile;
            for (int64_t k = 0; k < s.count; k += CODED_STEP(form)) {
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
    int64_t inputs = form == INT8 ? ((int64_t)m->inputs + 3) / 4 * 4 : m->inputs, group = group_inputs(m), groups = m->inputs / group;
    int64_t scale_bytes = (form == INT8 ? 0 : form == Q4_K ? 8 : form == Q8_0 || form == Q4_0 ? 2 : 4) * BLOCK;
    for (int r = 0; r < rows; r++) memset(o + r * UNIT, 0, blocks * BLOCK * sizeof *o);
    for (int b = 0; b < blocks; b++) {
        const uint8_t *w = (const uint8_t *)m->weights + (first + b) * inputs * input_bytes(form);
        const char *scales = (const char *)m->scales + (first + b) * groups * scale_bytes;
        coded_slice s = {w, 0, scales, a.x, a.scales, a.sums, inputs, inputs, groups};
        if (rows <= CODED_ROWS(form)) coded_kernels(form, rows, &s, &codes, o + b * BLOCK);
        else coded_strips(form, &s, group, scale_bytes, &codes, rows, o + b * BLOCK);
    }
    for (int r = 0; form == INT8 && r < rows; r++)
        for (int j = 0; j < blocks * BLOCK; j += LANES) {
            float *at = o + r * UNIT + j;
            vf scale = load((const float *)m->scales + first * BLOCK + j);
            store(at, __builtin_convertvector((vi)load(at), vf) * (a.scales[r] * scale));
        }
}

static void coded_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o) {
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

/* Products of bytes: INT8 with the instructions for neural networks */

#if defined(__AVX512VNNI__) && LANES == 16
#define INT8_BYTES 1
#define INT8_ROWS (SUMS / VECTORS / 2)

INLINE void int8_kernel(int rows, int blocks, const int8_t *x, int64_t stride, const int8_t *w, int64_t quads, int32_t *sums) {
    __m512i sum[INT8_ROWS][4 * VECTORS];
    memset(sum, 0, sizeof sum);
    for (int64_t k = 0; k < quads; k++)
#pragma GCC unroll 16
        for (int v = 0; v < blocks * VECTORS; v++) {
            __m512i weight;
            memcpy(&weight, w + ((v / VECTORS * quads + k) * BLOCK + v % VECTORS * LANES) * 4, sizeof weight);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                uint32_t four;
                memcpy(&four, x + r * stride + 4 * k, 4);
                __m512i input = _mm512_set1_epi32((int)(four ^ 0x80808080u)); /* + 128: the instruction needs unsigned inputs */
                sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], input, weight);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < blocks * VECTORS; v++) memcpy(sums + r * UNIT + v * LANES, &sum[r][v], sizeof sum[r][v]);
}

static void int8_product(const matrix *m, int64_t first, int blocks, activations a, int rows, float *o) {
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
#define INT8_CASE(N) \
    case N: \
        if (width == 1) int8_kernel(N, 1, inputs, stride, w, quads, sums + b * BLOCK); \
        else int8_kernel(N, FIT(N), inputs, stride, w, quads, sums + b * BLOCK); \
        break;
            INT8_CASE(1) INT8_CASE(2) INT8_CASE(3) INT8_CASE(4) INT8_CASE(5) INT8_CASE(6)
            }
        }
        for (int i = 0; i < n; i++)
            for (int j = 0; j < blocks * BLOCK; j++) {
                int64_t output = first * BLOCK + j;
                o[(r + i) * UNIT + j] = (float)(sums[i * UNIT + j] - 128 * m->sums[output]) * (a.scales[r + i] * scales[output]);
            }
    }
}
#else
#define INT8_BYTES 0
#define int8_product coded_product
#endif

/* Buffers of a pass, in `scratch` */

typedef struct {
    const pass *p;
    float *rows;   /* [rows][width] residual stream */
    float *input;  /* [rows][wider of width and heads * head_dim] input of qkv, out, gate_up and head */
    float *gated;  /* [rows][inner] input of down */
    float *qkv;    /* [rows][(heads + 2 kv_heads) head_dim]; later outputs [rows][width] that are not added at once */
    float *query;  /* [rows][heads][padded head_dim] */
    void *quantised;   /* words [rows][inputs]; INT8: inputs rounded up to 4, bytes with INT8_BYTES */
    float *x_scales;   /* of quantised activations: [rows], or [rows][groups] */
    int32_t *x_sums;   /* [rows][groups] */
    int first;     /* first row with logits */
} state;

static int64_t padded_dim(const model *m) { return (m->head_dim + 15) / 16 * 16; }
static int64_t input_width(const model *m) {
    int64_t mixed = (int64_t)m->heads * m->head_dim;
    return mixed > m->width ? mixed : m->width;
}
static int64_t qkv_width(const model *m) { return (int64_t)(m->heads + 2 * m->kv_heads) * m->head_dim; }

static int64_t qkv_space(const model *m) { return qkv_width(m) > m->width ? qkv_width(m) : m->width; }

static int64_t widest(const model *m) { return input_width(m) > m->inner ? input_width(m) : m->inner; }
static int64_t group_count(const model *m) { return widest(m) / 16 + 1; } /* of a row of activations */

int64_t scratch_floats(const model *m, int32_t rows) {
    return rows * (m->width + input_width(m) + m->inner + qkv_space(m) + m->heads * padded_dim(m) + 2 * group_count(m) + widest(m) / 2 + 2);
}

static state lay_out(const pass *p) {
    const model *m = p->model;
    state s = {.p = p, .first = p->rows - p->last};
    float *next = p->scratch;
    s.rows = next, next += (int64_t)p->rows * m->width;
    s.input = next, next += (int64_t)p->rows * input_width(m);
    s.gated = next, next += (int64_t)p->rows * m->inner;
    s.qkv = next, next += (int64_t)p->rows * qkv_space(m);
    s.query = next, next += (int64_t)p->rows * m->heads * padded_dim(m);
    s.x_scales = next, next += p->rows * group_count(m);
    s.x_sums = (int32_t *)next, next += p->rows * group_count(m);
    s.quantised = next;
    return s;
}

/* Operations on rows, between the products */

static void add(float *o, const float *x, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(o + i, load(o + i) + load(x + i));
    for (; i < count; i++) o[i] += x[i];
}

static void rms_norm(const float *x, const float *gain, float epsilon, int64_t width, float *o) {
    vf sum = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) { vf v = load(x + i); sum += v * v; }
    float squares = total(sum);
    for (; i < width; i++) squares += x[i] * x[i];
    float factor = 1.0f / sqrtf(squares / (float)width + epsilon);
    for (i = 0; i + LANES <= width; i += LANES) store(o + i, load(x + i) * factor * load(gain + i));
    for (; i < width; i++) o[i] = x[i] * factor * gain[i];
}

static void layer_norm(const float *x, const float *gain, float epsilon, int64_t width, float *o) {
    vf sum = {0}, squares = {0};
    int64_t i = 0, whole = width / LANES * LANES;
    for (; i < whole; i += LANES) sum += load(x + i);
    float mean = total(sum);
    for (; i < width; i++) mean += x[i];
    mean /= (float)width;
    for (i = 0; i < whole; i += LANES) { vf v = load(x + i) - mean; squares += v * v; }
    float variance = total(squares);
    for (; i < width; i++) variance += (x[i] - mean) * (x[i] - mean);
    float factor = 1.0f / sqrtf(variance / (float)width + epsilon);
    for (i = 0; i < whole; i += LANES) store(o + i, (load(x + i) - mean) * factor * load(gain + i) + load(gain + width + i));
    for (; i < width; i++) o[i] = (x[i] - mean) * factor * gain[i] + gain[width + i];
}

static void norm(const model *m, const float *x, const float *gain, float *o) {
    if (m->centred) layer_norm(x, gain, m->epsilon, m->width, o);
    else rms_norm(x, gain, m->epsilon, m->width, o);
}

/* Store the integers nearest to x / |peak of x| * limit and their sum; return the value of 1, NaN if x contains NaN or infinity. */
INLINE float quantise(const float *x, int64_t width, int limit, int bytes, void *to, int32_t *sum) {
    vf peaks = {0}, broken = {0};
    int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        vf v = load(x + i);
        peaks = larger(larger(v, -v), peaks), broken += v * 0.0f;
    }
    float peak = largest(peaks), invalid = total(broken);
    for (int64_t i = whole; i < width; i++) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak, invalid += x[i] * 0.0f;
    float factor = peak > 1e-30f ? (float)limit / peak : 0;
    vi integers = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        vi q = __builtin_convertvector(nearest(load(x + i) * factor), vi);
        integers += q;
        if (bytes == 1) { vc c = __builtin_convertvector(q, vc); memcpy((int8_t *)to + i, &c, sizeof c); }
        else { vh h = __builtin_convertvector(q, vh); memcpy((int16_t *)to + i, &h, sizeof h); }
    }
    *sum = 0;
    for (int i = 0; i < LANES; i++) *sum += integers[i];
    for (int64_t i = whole; i < width; i++) {
        int32_t q = (int32_t)(x[i] * factor + 12582912.0f - 12582912.0f);
        if (bytes == 1) ((int8_t *)to)[i] = (int8_t)q;
        else ((int16_t *)to)[i] = (int16_t)q;
        *sum += q;
    }
    return peak / (float)limit + invalid;
}

static int64_t activation_stride(const matrix *m) { return ((int64_t)m->inputs + 3) / 4 * 4; }

/* Swap the second and third of every four words, see stored_words. */
INLINE vq swapped(vq four) { return (four & 0xffff00000000ffff) | (four << 16 & 0xffff00000000) | (four >> 16 & 0xffff0000); }
static void swap_middle(int16_t *words, int64_t count) {
    int64_t i = 0;
    vq fours;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        memcpy(&fours, words + i, sizeof fours);
        fours = swapped(fours);
        memcpy(words + i, &fours, sizeof fours);
    }
    for (; i < count; i += 4) { int16_t second = words[i + 1]; words[i + 1] = words[i + 2], words[i + 2] = second; }
}

/* Activations of one row of `m` in the order of its weights */
static void quantise_row(const matrix *m, const float *x, void *to, float *scales, int32_t *sums) {
    int64_t group = group_inputs(m), stride = activation_stride(m), size = m->form == INT8 && INT8_BYTES ? 1 : 2;
    float factor = m->form == CODE4 ? code_peak(m->codes) / CODE_PEAK : 1;
    memset((char *)to + m->inputs * size, 0, (stride - m->inputs) * size);
    for (int64_t g = 0; g < m->inputs / group; g++)
        scales[g] = quantise(x + g * group, group, activation_peak(m->form), (int)size, (char *)to + g * group * size, sums + g) * factor;
    if (input_bytes(m->form) == BLOCK && size == 2) swap_middle(to, stride);
}

static void *quantised_row(const state *s, const matrix *m, int r) {
    return (char *)s->quantised + r * activation_stride(m) * (m->form == INT8 && INT8_BYTES ? 1 : 2);
}

static void quantise_rows(state *s, const matrix *next, const float *inputs, int64_t input_stride, int first) {
    if (next->form < INT8) return;
    int64_t groups = next->inputs / group_inputs(next);
    for (int r = first; r < s->p->rows; r++)
        quantise_row(next, inputs + r * input_stride, quantised_row(s, next, r), s->x_scales + r * groups, s->x_sums + r * groups);
}

static void normalise(state *s, const float *gain, const matrix *next, int first) {
    const model *m = s->p->model;
    for (int r = first; r < s->p->rows; r++)
        norm(m, s->rows + (int64_t)r * m->width, gain, s->input + r * input_width(m));
    quantise_rows(s, next, s->input, input_width(m), first);
}

static void embed(state *s) {
    const model *m = s->p->model;
    for (int r = 0; r < s->p->rows; r++) {
        int64_t id = s->p->ids[r], width = m->width;
        float *o = s->rows + r * width;
        for (int64_t i = 0; i < width; i++) o[i] = weight_of(m->embedding ? m->embedding : &m->head, id, i);
        if (m->embedding_scale != 1.0f)
            for (int64_t i = 0; i < width; i++) o[i] *= m->embedding_scale;
        if (m->positions)
            for (int64_t i = 0; i < width; i++) o[i] += weight_of(m->positions, s->p->positions[r], i);
        if (m->channel_scale)
            for (int64_t i = 0; i < width; i++) o[i] *= m->channel_scale[i];
    }
    normalise(s, m->layers[0]->enter, &m->layers[0]->qkv, 0);
}

/* Add the outputs in `qkv`, normalised if there is a gain, to the residual stream. */
static void add_outputs(state *s, const float *gain) {
    const model *m = s->p->model;
    for (int r = 0; r < s->p->rows; r++) {
        float *x = s->qkv + (int64_t)r * m->width, *o = s->rows + (int64_t)r * m->width;
        if (gain) norm(m, x, gain, x);
        add(o, x, m->width);
    }
}

/* Rotate queries and keys (RoPE, 2104.09864); write keys and values to the cache. */
static void rotate(state *s, int l) {
    const pass *p = s->p;
    const model *m = p->model;
    const layer *now = m->layers[l];
    int64_t dim = m->head_dim, half = m->rotated / 2, padded = padded_dim(m);
    float head[dim], turned[padded];
    memset(turned, 0, sizeof turned);
    for (int r = 0; r < p->rows; r++) {
        const float *cosines = p->cosines + p->positions[r] * half, *sines = p->sines + p->positions[r] * half;
        for (int h = 0; h < m->heads + 2 * m->kv_heads; h++) {
            const float *x = s->qkv + r * qkv_width(m) + h * dim;
            int is_query = h < m->heads, is_value = h >= m->heads + m->kv_heads;
            const float *gain = is_query ? now->query_norm : is_value ? 0 : now->key_norm;
            if (gain) { rms_norm(x, gain, m->epsilon, dim, head); x = head; }
            if (is_value) memcpy(turned, x, dim * sizeof *x);
            else {
                int64_t i = 0;
                for (; i + LANES <= half; i += LANES) {
                    vf a = load(x + i), b = load(x + i + half), c = load(cosines + i), d = load(sines + i);
                    store(turned + i, a * c - b * d), store(turned + i + half, b * c + a * d);
                }
                for (; i < half; i++) {
                    turned[i] = x[i] * cosines[i] - x[i + half] * sines[i];
                    turned[i + half] = x[i + half] * cosines[i] + x[i] * sines[i];
                }
                for (i = 2 * half; i < dim; i++) turned[i] = x[i];
            }
            if (is_query) {
                float *q = s->query + (r * m->heads + h) * padded;
                for (int64_t i = 0; i < padded; i += LANES) store(q + i, load(turned + i) * now->attention_scale);
                continue;
            }
            int64_t at = (((int64_t)l * 2 * m->kv_heads + h - m->heads) * p->capacity + p->held + r) * padded;
            if (m->cache_form == F32) memcpy((float *)p->cache + at, turned, padded * sizeof *turned);
            else for (int64_t i = 0; i < padded; i += LANES) {
                vu u = (vu)load(turned + i);
                vh h = __builtin_convertvector((u + 0x7fff + (u >> 16 & 1)) >> 16, vh);
                memcpy((uint16_t *)p->cache + at + i, &h, sizeof h);
            }
        }
    }
}

static void copy_hidden(state *s, int l) {
    const pass *p = s->p;
    if (!p->taps || p->taps[l] < 0) return;
    int64_t count = (int64_t)p->rows * p->model->width;
    memcpy(p->hidden + p->taps[l] * count, s->rows, count * sizeof *s->rows);
}

/* Attention of row r for the query heads of one key head */

/* Store the sums of the lanes of four vectors. */
INLINE void store_totals(const vf v[4], float *to) {
#if defined(__AVX__) && LANES == 8
    __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[0], (__m256)v[1]), _mm256_hadd_ps((__m256)v[2], (__m256)v[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#elif defined(__aarch64__)
    float32x4_t low = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]), high = vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]);
    vst1q_f32(to, vpaddq_f32(low, high));
#else
    for (int i = 0; i < 4; i++) to[i] = total(v[i]);
#endif
}

/* A row and a key head: visible positions, in the order of the text */
typedef struct {
    const void *keys, *values;
    const int32_t *far;
    int64_t near, count, padded, skipped; /* keys and values start after `skipped` positions */
} view;

INLINE int64_t offset(const view *w, int64_t j) { return (j < w->near ? j : w->far[j - w->near] - w->skipped) * w->padded; }
INLINE view within(int64_t window, int64_t position_bytes, view w) {
    w.skipped = window && w.count > window ? w.count - window : 0;
    int64_t near = w.near < w.skipped ? w.near : w.skipped;
    w.keys = (const char *)w.keys + w.skipped * position_bytes, w.values = (const char *)w.values + w.skipped * position_bytes;
    w.near -= near, w.far += w.skipped - near, w.count -= w.skipped;
    return w;
}

/* scores[heads][stride] of the keys from `start` to `end`, a multiple of 4 positions */
INLINE void score_keys(int form, int heads, const view *w, int64_t start, int64_t end, const float *q, float *scores, int64_t stride) {
    for (int64_t j = start; j < end; j += 4) {
        int64_t at[4];
        vf sum[HEAD_TILE][4];
        for (int i = 0; i < 4; i++) at[i] = offset(w, j + i < w->count ? j + i : j);
#pragma GCC unroll 8
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) sum[h][i] = (vf){0};
        for (int64_t d = 0; d < w->padded; d += LANES) {
            vf query[HEAD_TILE];
#pragma GCC unroll 8
            for (int h = 0; h < heads; h++) { query[h] = load(q + h * w->padded + d); HOLD(query[h]); }
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                vf key = load_as(form, w->keys, at[i] + d);
                HOLD(key);
#pragma GCC unroll 8
                for (int h = 0; h < heads; h++) sum[h][i] += query[h] * key;
            }
        }
        for (int h = 0; h < heads; h++) store_totals(sum[h], scores + h * stride + j);
    }
}

/* Replace scores by weights; returns their sum. */
INLINE float exponentials(float *scores, int64_t count) {
    int64_t whole = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = count; j < whole; j++) scores[j] = -INFINITY;
    vf peak = load(scores), sum = {0};
    for (int64_t j = LANES; j < whole; j += LANES) peak = larger(load(scores + j), peak);
    float most = largest(peak);
    for (int64_t j = 0; j < whole; j += LANES) {
        vf weights = exponential(load(scores + j) - most);
        store(scores + j, weights);
        sum += weights;
    }
    return total(sum);
}

/* o[heads][padded] = o + weights[heads][stride] times the values from `start` to `end` */
INLINE void mix_vectors(int form, int heads, int vectors, const view *w, int64_t start, int64_t end, const float *weights, int64_t stride, int64_t d, float *o) {
    vf mixed[HEAD_TILE][4];
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) mixed[h][v] = load(o + h * w->padded + d + v * LANES);
    for (int64_t j = start; j < end; j++) {
        int64_t at = offset(w, j) + d;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vf value = load_as(form, w->values, at + v * LANES);
            HOLD(value);
#pragma GCC unroll 8
            for (int h = 0; h < heads; h++) mixed[h][v] += weights[h * stride + j] * value;
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(o + h * w->padded + d + v * LANES, mixed[h][v]);
}
INLINE void mix_values(int form, int heads, const view *w, int64_t start, int64_t end, const float *weights, int64_t stride, float *o) {
    int64_t d = 0;
    for (; d + 4 * LANES <= w->padded; d += 4 * LANES) mix_vectors(form, heads, 4, w, start, end, weights, stride, d, o);
    for (; d < w->padded; d += LANES) mix_vectors(form, heads, 1, w, start, end, weights, stride, d, o);
}

/* Heads of a group share SHARED_KEYS keys in the first cache, and heads of a tile share them in registers. */
#define FOR_TILES(CALL) \
    for (int64_t start = 0, end; start < w.count; start = end) { \
        end = start + SHARED_KEYS < w.count ? start + SHARED_KEYS : w.count; \
        for (int64_t h = 0, part = 0, n; h < heads; h += n, part++) \
            switch (n = (heads - h + tiles - part - 1) / (tiles - part)) { TILE_CASES(CALL) } \
    }
#define TILE_CASE(COUNT, CALL) case COUNT: { enum { N = COUNT }; CALL; break; }
#if HEAD_TILE > 3
#define TILE_CASES(CALL) TILE_CASE(1, CALL) TILE_CASE(2, CALL) TILE_CASE(3, CALL) TILE_CASE(4, CALL) TILE_CASE(5, CALL) TILE_CASE(6, CALL)
#else
#define TILE_CASES(CALL) TILE_CASE(1, CALL) TILE_CASE(2, CALL) TILE_CASE(3, CALL)
#endif

INLINE void attend_as(int form, state *s, int l, int r, int kv, float *scores) {
    const pass *p = s->p;
    const model *m = p->model;
    int64_t padded = padded_dim(m), size = form == F32 ? 4 : 2, heads = m->heads / m->kv_heads, tiles = (heads + HEAD_TILE - 1) / HEAD_TILE;
    const char *keys = p->cache + ((int64_t)l * 2 * m->kv_heads + kv) * p->capacity * padded * size;
    view w = within(m->layers[l]->window, padded * size,
                    (view){keys, keys + m->kv_heads * p->capacity * padded * size, p->extra + p->extra_start[r], p->prefix[r],
                           p->prefix[r] + p->extra_start[r + 1] - p->extra_start[r], padded, 0});
    int64_t stride = (w.count + LANES - 1) / LANES * LANES;
    float mixed[heads * padded], sums[heads];
    const float *q = s->query + (r * m->heads + kv * heads) * padded;
    memset(mixed, 0, sizeof mixed);
    FOR_TILES(score_keys(form, N, &w, start, end, q + h * padded, scores + h * stride, stride))
    if (m->attention_cap) cap(scores, heads * stride, m->attention_cap);
    for (int64_t h = 0; h < heads; h++) sums[h] = exponentials(scores + h * stride, w.count);
    FOR_TILES(mix_values(form, N, &w, start, end, scores + h * stride, stride, mixed + h * padded))
    for (int64_t h = 0; h < heads; h++) {
        float *o = s->input + r * input_width(m) + (kv * heads + h) * m->head_dim, scale = 1.0f / sums[h];
        int64_t d = 0;
        for (; d + LANES <= m->head_dim; d += LANES) store(o + d, load(mixed + h * padded + d) * scale);
        for (; d < m->head_dim; d++) o[d] = mixed[h * padded + d] * scale;
    }
}

static void attend(state *s, int l, int r, int kv, float *scores) {
    if (s->p->model->cache_form == F32) attend_as(F32, s, l, r, kv, scores);
    else attend_as(BF16, s, l, r, kv, scores);
}

/* Products of units, with the operation that follows */

static int64_t block_count(const matrix *m) { return ((int64_t)m->outputs + BLOCK - 1) / BLOCK; }

/* o[rows from first][UNIT] = x times the blocks of unit u; returns their number. */
static int unit_rows(const state *s, const matrix *m, int64_t u, const float *x, int64_t stride, int first, float *o) {
    int64_t b = u * UNIT_BLOCKS, left = block_count(m) - b;
    int rows = s->p->rows - first, blocks = left < UNIT_BLOCKS ? (int)left : UNIT_BLOCKS;
    x += first * stride;
    switch (m->form) {
    case F32: unit_product(F32, m, b, blocks, x, stride, rows, o); break;
    case BF16: unit_product(BF16, m, b, blocks, x, stride, rows, o); break;
    case F16: unit_product(F16, m, b, blocks, x, stride, rows, o); break;
    default: {
        int64_t groups = first * (m->inputs / group_inputs(m));
        activations a = {quantised_row(s, m, first), s->x_scales + groups, s->x_sums + groups};
        if (m->form == INT8) int8_product(m, b, blocks, a, rows, o);
        else coded_product(m, b, blocks, a, rows, o);
    }
    }
    if (m->bias)
        for (int r = 0; r < rows; r++) add(o + r * UNIT, m->bias + b * BLOCK, blocks * BLOCK);
    return blocks;
}

static int columns(const matrix *m, int64_t u) {
    int64_t left = m->outputs - u * UNIT;
    return left < UNIT ? (int)left : UNIT;
}

static void write_unit(const matrix *m, int64_t u, const float *o, int rows, int64_t stride, float *to) {
    for (int r = 0; r < rows; r++) memcpy(to + r * stride + u * UNIT, o + r * UNIT, columns(m, u) * sizeof *o);
}

static void add_unit(const matrix *m, int64_t u, const float *o, int rows, int64_t stride, float *to) {
    for (int r = 0; r < rows; r++) add(to + r * stride + u * UNIT, o + r * UNIT, columns(m, u));
}

INLINE void gate_unit_as(int kind, const state *s, const matrix *m, int64_t u, float *o) { /* activation of gate, times up */
    const model *net = s->p->model;
    int blocks = unit_rows(s, m, u, s->input, input_width(net), 0, o);
    for (int r = 0; r < s->p->rows; r++)
        for (int pair = 0; pair < blocks / 2; pair++) {
            float *gates = o + r * UNIT + 2 * pair * BLOCK, *ups = gates + BLOCK;
            for (int j = 0; j < BLOCK; j += LANES) store(gates + j, activate(kind, load(gates + j)) * load(ups + j));
            int64_t at = (u * UNIT_BLOCKS / 2 + pair) * BLOCK, left = net->inner - at;
            memcpy(s->gated + (int64_t)r * net->inner + at, gates, (left < BLOCK ? left : BLOCK) * sizeof *o);
        }
}

INLINE void up_unit_as(int kind, const state *s, const matrix *m, int64_t u, float *o) {
    int blocks = unit_rows(s, m, u, s->input, input_width(s->p->model), 0, o);
    for (int r = 0; r < s->p->rows; r++)
        for (int j = 0; j < blocks * BLOCK; j += LANES) store(o + r * UNIT + j, activate(kind, load(o + r * UNIT + j)));
    write_unit(m, u, o, s->p->rows, s->p->model->inner, s->gated);
}

static void inner_unit(const state *s, const matrix *m, int64_t u, float *o) {
#define ACTIVATION_CASE(KIND) \
    case KIND: \
        if (s->p->model->gated) gate_unit_as(KIND, s, m, u, o); \
        else up_unit_as(KIND, s, m, u, o); \
        break;
    switch (s->p->model->activation) { ACTIVATION_CASE(SILU) ACTIVATION_CASE(GELU_TANH) ACTIVATION_CASE(GELU_ERF) }
}

/* Phases: up to 6 per layer, then the head; a chunk is a range of units (of outputs, or rows of a key head) */

enum stage { QKV, VALUE, ATTEND, OUT, GATE, DOWN, STAGES };

static const matrix *product_of(const model *m, int phase) {
    if (phase / STAGES == m->layer_count) return &m->head;
    const layer *now = m->layers[phase / STAGES];
    const matrix *products[STAGES] = {&now->qkv, &now->value, 0, &now->out, &now->gate_up, &now->down};
    return products[phase % STAGES];
}

static int64_t unit_count(const state *s, int phase) {
    const matrix *product = product_of(s->p->model, phase);
    if (!product) return (int64_t)s->p->rows * s->p->model->kv_heads;
    return (block_count(product) + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
}

static int64_t chunk_units(const state *s, int phase) {
    const matrix *product = product_of(s->p->model, phase);
    int64_t units = unit_count(s, phase), parts = 4 * s->p->threads, share = product ? (units + parts - 1) / parts : units / parts;
    int64_t size = product ? 1 + CHUNK_BYTES / (UNIT_BLOCKS * product->inputs * input_bytes(product->form)) : share;
    if (s->p->threads == 1) return units;
    size = size < share ? size : share;
    return size > units / 60000 ? size : units / 60000 + 1; /* the ticket counts 16 bits */
}

static void run_chunk(state *s, int phase, int64_t chunk, float *buffer) {
    const pass *p = s->p;
    const model *m = p->model;
    const matrix *product = product_of(m, phase);
    int64_t size = chunk_units(s, phase), count = unit_count(s, phase), end = (chunk + 1) * size;
    int64_t stride = input_width(m);
    for (int64_t u = chunk * size; u < (end < count ? end : count); u++) {
        if (product == &m->head) {
            int blocks = unit_rows(s, product, u, s->input, stride, s->first, buffer);
            for (int r = 0; m->logit_cap && r < p->last; r++) cap(buffer + r * UNIT, blocks * BLOCK, m->logit_cap);
            write_unit(product, u, buffer, p->last, product->outputs, p->logits);
            continue;
        }
        switch (phase % STAGES) {
        case QKV:
            unit_rows(s, product, u, s->input, stride, 0, buffer);
            write_unit(product, u, buffer, p->rows, qkv_width(m), s->qkv);
            break;
        case VALUE:
            unit_rows(s, product, u, s->input, stride, 0, buffer);
            write_unit(product, u, buffer, p->rows, qkv_width(m), s->qkv + (m->heads + m->kv_heads) * m->head_dim);
            break;
        case ATTEND: attend(s, phase / STAGES, (int)(u / m->kv_heads), (int)(u % m->kv_heads), buffer); break;
        case OUT:
            unit_rows(s, product, u, s->input, stride, 0, buffer);
            if (m->parallel || m->layers[phase / STAGES]->after_out) write_unit(product, u, buffer, p->rows, m->width, s->qkv);
            else add_unit(product, u, buffer, p->rows, m->width, s->rows);
            break;
        case GATE: inner_unit(s, product, u, buffer); break;
        case DOWN:
            unit_rows(s, product, u, s->gated, m->inner, 0, buffer);
            if (m->layers[phase / STAGES]->after_down) write_unit(product, u, buffer, p->rows, m->width, s->qkv);
            else add_unit(product, u, buffer, p->rows, m->width, s->rows);
        }
    }
}

/* Serial part after a phase. Returns the next phase, or -1 after the last. */
static int finish_phase(state *s, int phase) {
    const pass *p = s->p;
    const model *m = p->model;
    int l = phase / STAGES;
    if (l == m->layer_count) return -1;
    const layer *now = m->layers[l];
    switch (phase % STAGES) {
    case QKV:
        if (now->value.weights) { quantise_rows(s, &now->value, s->input, input_width(m), 0); break; }
        phase++; /* fallthrough */
    case VALUE: rotate(s, l); break;
    case ATTEND: quantise_rows(s, &now->out, s->input, input_width(m), 0); break;
    case OUT:
        if (now->after_out) add_outputs(s, now->after_out);
        normalise(s, now->between, &now->gate_up, 0);
        if (m->parallel) add_outputs(s, 0);
        break;
    case GATE: quantise_rows(s, &now->down, s->gated, m->inner, 0); break;
    case DOWN:
        if (now->after_down) add_outputs(s, now->after_down);
        copy_hidden(s, l);
        if (l + 1 < m->layer_count) { normalise(s, m->layers[l + 1]->enter, &m->layers[l + 1]->qkv, 0); break; }
        if (!p->last) return -1;
        normalise(s, m->leave, &m->head, s->first);
    }
    return phase + 1;
}

/* Threads. Each has a range of the chunks of a phase, so that contended writes are few, and then takes chunks of the others.
 * A ticket contains phase (32 bits), end of the range (16) and next chunk (16). */

#define OWN_LINE __attribute__((aligned(64)))

static struct {
    struct { _Atomic uint64_t ticket; } OWN_LINE ranges[MAX_THREADS];
    _Atomic uint32_t done OWN_LINE; /* chunks of the phase */
    _Atomic uint32_t opened OWN_LINE, sleepers, running;
    state *now;
    int first_phase;          /* ticket's number of phase 0 */
    _Atomic int threads;      /* participants; the others sleep until there are more */
    uint32_t number, chunks;  /* of the phase */
    int started;
    pid_t owner;
    pthread_mutex_t busy, mutex;
    pthread_cond_t changed, enlarged;
    float *buffers[MAX_THREADS];
    size_t sizes[MAX_THREADS];
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .enlarged = PTHREAD_COND_INITIALIZER};

static int is_open(uint64_t t) { return (t & 0xffff) < (t >> 16 & 0xffff); }

static void wake_threads(void) {
    atomic_fetch_add(&pool.opened, 1);
    if (!atomic_load(&pool.sleepers)) return;
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&pool.changed);
    pthread_mutex_unlock(&pool.mutex);
}

static void open_phase(uint32_t number, int64_t chunks) {
    pool.number = number, pool.chunks = (uint32_t)chunks;
    atomic_store(&pool.done, 0);
    for (int t = 0, threads = atomic_load(&pool.threads); t < threads; t++) {
        uint64_t first = (uint64_t)(chunks * t / threads), end = (uint64_t)(chunks * (t + 1) / threads);
        atomic_store_explicit(&pool.ranges[t].ticket, (uint64_t)number << 32 | end << 16 | first, memory_order_release);
    }
    wake_threads();
}

static int64_t chunk_count(const state *s, int phase) {
    int64_t size = chunk_units(s, phase);
    return (unit_count(s, phase) + size - 1) / size;
}

/* Run the remaining chunks of a range. The phase cannot end before they are counted. */
static int run_range(int range, int thread) {
    uint32_t count = 0;
    uint64_t t;
    while (is_open(atomic_load(&pool.ranges[range].ticket)) && is_open(t = atomic_fetch_add(&pool.ranges[range].ticket, 1))) {
        run_chunk(pool.now, (int)((uint32_t)(t >> 32) - (uint32_t)pool.first_phase), t & 0xffff, pool.buffers[thread]);
        count++;
    }
    if (!count) return 0;
    uint32_t number = pool.number, chunks = pool.chunks;
    if (atomic_fetch_add(&pool.done, count) + count < chunks) return 1;
    state *s = pool.now;
    int phase = (int)(number - (uint32_t)pool.first_phase), next = finish_phase(s, phase);
    if (next >= 0) open_phase(number + (uint32_t)(next - phase), chunk_count(s, next));
    else atomic_store(&pool.running, 0), wake_threads(); /* the caller may start the next pass between these */
    return 1;
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wait until `opened` differs from `seen`: spin, then sleep. */
static void wait_for_phase(uint32_t seen) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load(&pool.opened) != seen) return;
        if (i % YIELD == YIELD - 1) sched_yield();
        else pause_briefly();
    }
    pthread_mutex_lock(&pool.mutex);
    atomic_fetch_add(&pool.sleepers, 1);
    while (atomic_load(&pool.opened) == seen) pthread_cond_wait(&pool.changed, &pool.mutex);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.mutex);
}

static void work(int thread, int is_caller) {
    for (;;) {
        uint32_t seen = atomic_load(&pool.opened);
        if (is_caller && !atomic_load(&pool.running)) return;
        int threads = atomic_load(&pool.threads), found = 0;
        if (thread >= threads) {
            pthread_mutex_lock(&pool.mutex);
            while (thread >= atomic_load(&pool.threads)) pthread_cond_wait(&pool.enlarged, &pool.mutex);
            pthread_mutex_unlock(&pool.mutex);
            continue;
        }
        for (int i = 0; i < threads && !found; i++) found = run_range((thread + i) % threads, thread);
        if (!found) wait_for_phase(seen);
    }
}

static void set_threads(int count) {
    if (atomic_load(&pool.threads) == count) return;
    pthread_mutex_lock(&pool.mutex);
    atomic_store(&pool.threads, count);
    pthread_cond_broadcast(&pool.enlarged);
    pthread_mutex_unlock(&pool.mutex);
}

static void *worker(void *thread) { work((int)(intptr_t)thread, 0); return 0; }

static int prepare_threads(const pass *p) {
    int64_t group = p->model->heads / p->model->kv_heads, keys = 0;
    for (int r = 0; r < p->rows; r++) {
        int64_t seen = p->prefix[r] + p->extra_start[r + 1] - p->extra_start[r] + LANES;
        keys = seen > keys ? seen : keys;
    }
    size_t floats = group * keys > (int64_t)p->rows * UNIT ? group * keys : (int64_t)p->rows * UNIT;
    for (int t = 0; t < p->threads || t <= pool.started; t++) { /* also of threads that leave the previous pass */
        if (pool.sizes[t] >= floats) continue;
        float *larger_buffer = realloc(pool.buffers[t], floats * sizeof(float));
        if (!larger_buffer) return 0;
        pool.buffers[t] = larger_buffer, pool.sizes[t] = floats;
    }
    for (; pool.started < p->threads - 1; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, worker, (void *)(intptr_t)(pool.started + 1))) break;
        pthread_detach(thread);
    }
    return 1;
}

/* Compute the logits of the last `last` rows. Returns 0, or 1 without memory. */
int run_pass(const pass *requested) {
    pass limited = *requested, *p = &limited;
    p->threads = p->threads < MAX_THREADS ? p->threads : MAX_THREADS;
    if (pool.owner != getpid()) { /* threads do not survive fork() */
        pthread_mutex_init(&pool.busy, 0), pthread_mutex_init(&pool.mutex, 0), pthread_cond_init(&pool.changed, 0), pthread_cond_init(&pool.enlarged, 0);
        pool.started = 0, pool.owner = getpid();
        atomic_store(&pool.sleepers, 0);
    }
    pthread_mutex_lock(&pool.busy);
    int ready = prepare_threads(p);
    if (ready) {
        state s = lay_out(p);
        embed(&s);
        pool.now = &s;
        set_threads(p->threads);
        uint32_t number = pool.number + 1;
        pool.first_phase = (int)number;
        atomic_store(&pool.running, 1);
        open_phase(number, chunk_count(&s, 0));
        work(0, 1);
    }
    pthread_mutex_unlock(&pool.busy);
    return !ready;
}

/* Sample a chain; `first` has one row of logits. Returns 0, or 1 without memory. */
int draft_chain(const pass *first, const chain *c) {
    pass p = *first;
    int32_t position, prefix, starts[2] = {0, 0};
    for (int i = 0; i < c->count; i++) {
        if (run_pass(&p)) return 1;
        largest_logits(p.logits, 1, c->vocab, c->vocab, c->tokens + i, c->peaks + i);
        if (c->temperature > 0) {
            float *probs = c->probs + i * c->vocab;
            distributions(p.logits, 1, c->vocab, c->vocab, c->temperature, c->top_k, c->top_p, probs, c->scratch);
            c->tokens[i] = (int32_t)invert(probs, c->vocab, c->uniforms[i]);
            c->chosen[i] = probs[c->tokens[i]];
        }
        position = p.held += p.rows, prefix = position + 1;
        p.rows = 1, p.ids = c->tokens + i, p.positions = &position, p.prefix = &prefix, p.extra_start = starts;
    }
    return 0;
}

/* Layout for the caller: outputs per block and vector */
int block_outputs(void) { return BLOCK; }
int vector_outputs(void) { return LANES; }

static uint32_t random_bits(uint32_t *seed) { return *seed = *seed * 1664525u + 1013904223u; }

/* Store the integer v, or its lowest bits, as weight (k, n) of `m`. */
static void set_weight(const matrix *m, int64_t k, int64_t n, int v) {
    int shift;
    int64_t at = position(m, n, k, &shift);
    switch (m->form) {
    case F32: ((float *)m->weights)[at] = (float)v; break;
    case BF16: ((uint16_t *)m->weights)[at] = to_bf16((float)v); break;
    case F16: { /* v = mantissa * 2^exponent */
        int a = v < 0 ? -v : v, e = 0;
        while (a >> (e + 1)) e++;
        ((uint16_t *)m->weights)[at] = a ? (uint16_t)((v < 0) << 15 | (e + 15) << 10 | (a << (10 - e) & 0x3ff)) : 0;
        break;
    }
    case INT8: ((int32_t *)m->sums)[n] += v; /* fallthrough */
    case Q8_0: case Q6_K: ((int8_t *)m->weights)[at] = (int8_t)v; break;
    default: ((uint8_t *)m->weights)[at] |= (uint8_t)((v & 15) << shift);
    }
}

static int functions_are_exact(void) {
    for (int i = -2560; i <= 2560; i++) {
        double x = i / 128.0, inner = 0.79788456080286536 * (x + 0.044715 * x * x * x);
        double expected[] = {x / (1 + exp(-x)), 0.5 * x * (1 + tanh(inner)), 0.5 * x * erfc(-x * 0.70710678118654752), tanh(x)};
        vf v = fill((float)x), found[] = {activate(SILU, v), activate(GELU_TANH, v), activate(GELU_ERF, v), hyperbolic_tangent(v)};
        for (int f = 0; f < 4; f++)
            if (!(fabs(found[f][LANES - 1] - expected[f]) <= 1e-6 * (0.1 + fabs(expected[f])))) return 0;
    }
    return 1;
}

/* Compare the products of every form with scalar sums. Returns 0 if equal within rounding; used once after compiling. */
int self_check(void) {
    enum { K = STRIP + TILE_INPUTS, N = 5 * BLOCK, ROWS = TILE_ROWS + 3 };
    static float weights[K * N], values[K * N], x[ROWS * K], scales[N * K / 16], codes[16], o[ROWS * UNIT], x_scales[ROWS * K / 16];
    static int32_t sums[N], x_sums[ROWS * K / 16];
    static uint16_t halves[2 * N * K / EXACT];
    static uint8_t code_bytes[32];
    static int16_t quantised[ROWS * K];
    uint32_t seed = 1;
    if (!functions_are_exact() || !sampling_is_exact()) return 2 + Q6_K;
    for (int i = 0; i < 16; i++) codes[i] = (float)(i - 7) / 9.0f;
    set_code_bytes(codes, code_bytes);
    for (int i = 0; i < N * K / 16; i++) scales[i] = 1.0f + (float)(i % 97) / 64.0f;
    for (int i = 0; i < 2 * N * K / EXACT; i++) halves[i] = (uint16_t)(0x3c00 + random_bits(&seed) % 0x400); /* 1 to 2 */
    for (int i = 0; i < ROWS * K; i++) x[i] = i % K ? (float)(random_bits(&seed) % 255) - 127.0f : 127.0f; /* exact in 8 bits */
    for (int form = F32; form <= Q6_K; form++) {
        matrix m = {weights, form >= Q8_0 && form <= Q4_1 ? (void *)halves : (void *)scales, sums, codes, code_bytes, 0, form, N, K};
        activations a = {quantised, x_scales, x_sums};
        for (int r = 0; form >= INT8 && r < ROWS; r++) {
            int64_t groups = r * (K / group_inputs(&m)), size = form == INT8 && INT8_BYTES ? 1 : 2;
            quantise_row(&m, x + r * K, (char *)quantised + r * K * size, x_scales + groups, x_sums + groups);
        }
        memset(weights, 0, sizeof weights), memset(sums, 0, sizeof sums);
        for (int i = 0; i < K * N; i++) set_weight(&m, i / N, i % N, (int)(random_bits(&seed) >> 25) - 64);
        for (int i = 0; i < K * N; i++) values[i] = weight_of(&m, i % N, i / N);
        for (int rows = 1; rows <= ROWS; rows++)
            for (int first = 0; first <= UNIT_BLOCKS; first += UNIT_BLOCKS) {
                int blocks = first ? N / BLOCK - UNIT_BLOCKS : UNIT_BLOCKS;
                if (form == F32) unit_product(F32, &m, first, blocks, x, K, rows, o);
                if (form == BF16) unit_product(BF16, &m, first, blocks, x, K, rows, o);
                if (form == F16) unit_product(F16, &m, first, blocks, x, K, rows, o);
                if (form == INT8) int8_product(&m, first, blocks, a, rows, o);
                if (form >= CODE4) coded_product(&m, first, blocks, a, rows, o);
                for (int r = 0; r < rows; r++)
                    for (int j = 0; j < blocks * BLOCK; j++) {
                        double sum = 0;
                        for (int k = 0; k < K; k++) sum += (double)values[k * N + first * BLOCK + j] * x[r * K + k];
                        double rounding = form >= CODE4 ? 5e-4 : 1e-5; /* of activations */
                        if (!(fabs(o[r * UNIT + j] - sum) <= rounding * (1e4 + fabs(sum)))) return 1 + form;
                    }
            }
    }
    return 0;
}
