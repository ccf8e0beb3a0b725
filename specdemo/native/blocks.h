/* Blocks of outputs: their size, and the vectors of numbers from which products are computed */
#pragma once
#include "interface.h"
#include "vectors.h"

/* Rows of a tile, and vectors of sums that fit into registers */
#if LANES == 16
#define TILE_ROWS 12
#define SUMS 24
#elif defined(__aarch64__)
#define TILE_ROWS 6
#define SUMS 24
#else
#define TILE_ROWS 6
#define SUMS 12
#endif
/* Vectors per block of outputs: 2 or 4 */
#ifndef VECTORS
#if defined(__aarch64__)
#define VECTORS 4
#else
#define VECTORS 2
#endif
#endif
#define BLOCK (VECTORS * LANES)
#define UNIT_BLOCKS 4 /* blocks per product */
#define UNIT (UNIT_BLOCKS * BLOCK)
#define TILE_INPUTS 64
#define WORD_CODES (LANES == 16) /* codes are looked up as words */
#define EXACT 32                 /* inputs per exact sum of products of 16-bit integers */
#define STRIP 128                /* inputs decoded at once for many rows */
/* Blocks whose sums of `rows` rows fit into registers with the inputs. */
#define FIT(rows) ((rows) * 4 * VECTORS < SUMS ? 4 : (rows) * 2 * VECTORS < SUMS ? 2 : 1)

/* Distances in bytes at which weights are prefetched into the first and the second cache, because hardware prefetches
 * too little during other work. */
#define AHEAD 512
#define FAR_AHEAD 8192

typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int8_t vc __attribute__((vector_size(LANES)));
typedef uint64_t vq __attribute__((vector_size(4 * LANES)));
typedef uint8_t vb __attribute__((vector_size(4 * LANES)));
typedef uint16_t vw __attribute__((vector_size(4 * LANES)));
typedef int16_t vs __attribute__((vector_size(4 * LANES)));

INLINE vf load_bf16(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
INLINE vh round_bf16(vf x) { /* nearest, half to even */
    vu u = (vu)x;
    return __builtin_convertvector((u + 0x7fff + (u >> 16 & 1)) >> 16, vh);
}
INLINE vh round_f16(vf x) { /* nearest, half to even; numbers beyond the largest half become it */
    x = larger(fill(-65504.0f), x), x = -larger(fill(-65504.0f), -x);
#if LANES == 16
    return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__) && defined(__AVX__)
    return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    vu u = (vu)x & 0x7fffffff, small = (vu)((vf)u + 0.5f) - 0x3f000000;
    vu normal = ((u + 0xfff + (u >> 13 & 1)) >> 13) - 0x1c000;
    vu half = (vu)choose((vi)u < 0x38800000, (vf)small, choose((vi)u > 0x7f800000, (vf)(u >> 13 | 0x200), (vf)normal));
    return __builtin_convertvector(half | ((vu)x >> 16 & 0x8000), vh);
#endif
}
INLINE vf load_f16(const uint16_t *p) {
#if LANES == 16
    __m256i packed;
    memcpy(&packed, p, sizeof packed);
    return (vf)_mm512_cvtph_ps(packed);
#elif defined(__F16C__) && defined(__AVX__)
    __m128i packed;
    memcpy(&packed, p, sizeof packed);
    return (vf)_mm256_cvtph_ps(packed);
#else
    vh h;
    memcpy(&h, p, sizeof h);
    vu u = __builtin_convertvector(h, vu);
    vf magnitude = (vf)((u & 0x7fff) << 13) * 0x1p112f; /* exact, also for subnormal numbers */
    return (vf)((vu)magnitude | (u & 0x8000) << 16);
#endif
}
INLINE vf load_as(int form, const void *base, int64_t i) {
    if (form == F32) return load((const float *)base + i);
    if (form == BF16) return load_bf16((const uint16_t *)base + i);
    return load_f16((const uint16_t *)base + i);
}

/* Into the second cache, for kernels with enough work to hide its latency */
INLINE void prefetch_far(const void *weights, int bytes) {
#pragma GCC unroll 16
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch((const char *)weights + line + FAR_AHEAD, 0, 2);
}
INLINE void prefetch(const void *weights, int bytes) {
#pragma GCC unroll 16
    for (int line = 0; line < bytes; line += 64) {
        prefetch_far((const char *)weights + line, 1);
        __builtin_prefetch((const char *)weights + line + AHEAD);
    }
}

/* Keep a vector in a register: compilers read it from memory again for each product. */
#if defined(__x86_64__)
#define HOLD(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define HOLD(v) __asm__("" : "+w"(v))
#else
#define HOLD(v) (void)(v)
#endif
