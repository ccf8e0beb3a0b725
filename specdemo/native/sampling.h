/* See sampling.c. */
#pragma once
#include "interface.h"

double largest_probability(const float *logits, int64_t count, float peak);
int sampling_is_exact(void);
