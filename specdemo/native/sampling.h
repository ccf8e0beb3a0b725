/* See sampling.c. */
#pragma once
#include <stdint.h>

void largest_logits(const float *logits, int64_t rows, int64_t stride, int64_t count, int32_t *tokens, float *values);
void distributions(const float *logits, int64_t rows, int64_t stride, int64_t count, float temperature, int64_t top_k,
                   double top_p, float *probs, float *scratch);
double largest_probability(const float *logits, int64_t count, float peak);
int64_t invert(const float *probs, int64_t count, double uniform);
int sampling_is_exact(void);
