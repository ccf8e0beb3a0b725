/* Activation functions */
#pragma once
#include "interface.h"
#include "vectors.h"

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
