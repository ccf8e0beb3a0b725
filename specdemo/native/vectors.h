/* Vectors of floats */
#pragma once
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
