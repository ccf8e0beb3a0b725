/* See sampling.c. */
#pragma once
#include "interface.h"

void distribution(const float *x, int64_t count, int32_t best, const sampling *s, float *p, float *scratch);
double largest_probability(const float *logits, int64_t count, float peak);
int sampling_is_exact(void);
