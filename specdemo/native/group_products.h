/* Products of integers and codes with one scale per output and group of inputs, and of activations with one per row and
 * group */
#pragma once
#include "products.h"

#define QUADS (EXACT / 4)

/* Inputs of a block */
typedef struct {
    const uint8_t *w;
    const vi *tile; /* decoded words, or null */
    const char *scales;
    const void *x;                 /* [rows][stride] integers */
    const float *x_scales;         /* [rows][groups] */
    const correction *corrections; /* [rows][groups]; forms with an offset or minimum */
    int64_t count, stride, groups;
} coded_slice;

INLINE vu load_stored(const uint8_t *p) {
    vu stored;
    memcpy(&stored, p, sizeof stored);
    return stored;
}

/* Scales and minima of a group of inputs */
typedef struct {
    vf scale[VECTORS], minimum[VECTORS];
} group_scales;

INLINE group_scales read_scales(int form, const char *scales) {
    group_scales read;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        read.scale[v] = load_as(scale_form_of(form), scales, v * LANES);
        if (has_minimum(form)) read.minimum[v] = load_as(scale_form_of(form), scales, BLOCK + v * LANES);
    }
    return read;
}

/* o + sum of products times the scales of row r */
INLINE vf scaled(int form, const coded_slice *s, int64_t at, const group_scales *g, int v, vi sum, vf o) {
    o += __builtin_convertvector(sum, vf) * s->x_scales[at] * g->scale[v];
    return has_minimum(form) ? o + g->minimum[v] * s->corrections[at].sum : o;
}

/* Initial sums of products */
INLINE vi start_of(int form, const coded_slice *s, int64_t at) {
    return (offset_of(form) ? s->corrections[at].offset : 0) - (vi){0};
}
