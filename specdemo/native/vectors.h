/* Vectors of numbers, and functions of vectors of floats */
#pragma once
#include "interface.h"
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16 /* floats per vector */
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int8_t vc __attribute__((vector_size(LANES)));
typedef uint64_t vq __attribute__((vector_size(4 * LANES)));
typedef uint8_t vb __attribute__((vector_size(4 * LANES)));
typedef uint16_t vw __attribute__((vector_size(4 * LANES)));
typedef int16_t vs __attribute__((vector_size(4 * LANES)));

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf fill(float x) { return x - (vf){0}; }
INLINE vf larger(vf a, vf b) { /* b if one is NaN */
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi m = a > b;
    return (vf)((m & (vi)a) | (~m & (vi)b));
#endif
}
INLINE float total(vf v) { /* pairwise, in a fixed order */
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)v);
#else
    float a[LANES];
    store(a, v);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) a[i] += a[i + n];
    return a[0];
#endif
}
INLINE float largest(vf v) { /* of numbers */
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}
INLINE vi larger_integers(vi a, vi b) {
#if LANES == 16
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    vi m = a > b;
    return (m & a) | (~m & b);
#endif
}
INLINE int32_t largest_integer(vi v) {
#if LANES == 16
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}
INLINE int32_t sum_of(vi v) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
#endif
}
INLINE vf nearest(vf x) { return (x + 12582912.0f) - 12582912.0f; } /* half to even, |x| < 2^22 */
INLINE vf exponential(vf x) { /* Cephes' expf: relative error 2e-7; x <= 0 or |x| < 87 */
    x = larger(fill(-87.0f), x);
    x = -larger(fill(-87.0f), -x);
    vf n = nearest(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = fill(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f, p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f, p = p * r + 5.0000001201e-1f, p = p * r * r + r + 1.0f;
    return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}
INLINE vf logarithm(vf x) {                              /* error below 1e-6; x >= FLT_MIN */
    vi bits = (vi)x - 0x3f3504f3, exponent = bits >> 23; /* x = m 2^exponent, sqrt(1/2) <= m < sqrt(2) */
    vf m = (vf)((bits & 0x7fffff) + 0x3f3504f3), t = (m - 1.0f) / (m + 1.0f), s = t * t;
    vf series = fill(2.0f / 9) * s + 2.0f / 7;
    series = series * s + 2.0f / 5, series = series * s + 2.0f / 3, series = series * s + 2.0f;
    return __builtin_convertvector(exponent, vf) * 0.69314718f + t * series;
}
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

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
INLINE void cap(float *x, int64_t whole, float limit) { /* whole: multiple of LANES */
    for (int64_t i = 0; i < whole; i += LANES) store(x + i, limit * hyperbolic_tangent(load(x + i) / limit));
}

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

/* Distances in bytes at which weights are prefetched into the first and the second cache, because hardware prefetches
 * too little during other work. */
#define AHEAD 512
#define FAR_AHEAD 8192

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
