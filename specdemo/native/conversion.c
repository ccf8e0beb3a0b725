/* Rows of floats, stored in the number format of a matrix */
#include "formats.h"
#include <stdlib.h>

/* Scale of integers from -8 to 7: of some candidates, the one with the least squared error */
static float scale_of_four_bits(const float *x, int64_t count) {
    float extreme = 0, best = 0, least = INFINITY;
    for (int64_t i = 0; i < count; i++) extreme = fabsf(x[i]) > fabsf(extreme) ? x[i] : extreme;
    for (float integer = -9; integer <= -7 && extreme != 0; integer += 0.25f) {
        float scale = extreme / integer, error = 0;
        for (int64_t i = 0; i < count; i++) {
            float rest = x[i] - fmaxf(-8, fminf(7, rintf(x[i] / scale))) * scale;
            error += rest * rest;
        }
        if (error < least) least = error, best = scale;
    }
    return best;
}

/* Store a scale, and return its stored value. */
static float write_scale(const matrix *m, int64_t i, float scale) {
    if (scale_form_of(m->form) == F32) return ((float *)m->scales)[i] = scale;
    vh half = round_f16(fill(scale));
    ((uint16_t *)m->scales)[i] = half[0];
    return load_f16((uint16_t *)&half)[0];
}

/* Store a group of inputs from `start` on as the nearest integers. */
static void write_group(const matrix *m, int64_t n, int64_t start, const float *x) {
    int64_t count = group_inputs(m), group = n / BLOCK * (m->inputs / count) + start / count;
    float peak = 0;
    for (int64_t i = 0; i < count; i++) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
    float nearest = has_bytes(m->form) ? peak / 127 : scale_of_four_bits(x, count);
    float scale = write_scale(m, group * BLOCK + n % BLOCK, nearest), factor = scale != 0 ? 1 / scale : 0;
    for (int64_t i = 0; i < count; i++) {
        int shift, mask = has_bytes(m->form) ? 255 : 15;
        uint8_t *byte = (uint8_t *)m->weights + position(m, n, start + i, &shift);
        int code = (int)fmaxf(0, fminf((float)mask, rintf(x[i] * factor) + (float)FORMATS[m->form].offset));
        *byte = (uint8_t)((*byte & ~(mask << shift)) | code << shift);
    }
}

/* Store rows[count][inputs] as outputs from `first` on of a matrix of F32, INT8, Q8_0 or Q4_0. Returns a `result`. */
int write_rows(const matrix *m, int64_t first, int64_t count, const float *rows) {
    if (m->form != F32 && m->form != INT8 && m->form != Q8_0 && m->form != Q4_0) return INVALID;
    if (first < 0 || count < 0 || count > m->outputs - first || m->inputs % group_inputs(m)) return INVALID;
    for (int64_t n = first; n < first + count; n++, rows += m->inputs)
        if (m->form == F32)
            for (int64_t k = 0; k < m->inputs; k++)
                ((float *)m->weights)[(n / BLOCK * m->inputs + k) * BLOCK + n % BLOCK] = rows[k];
        else
            for (int64_t k = 0; k < m->inputs; k += group_inputs(m)) write_group(m, n, k, rows + k);
    return DONE;
}

/* Store `outputs` of another matrix as outputs from `first` on. Returns a `result`. */
int copy_rows(const matrix *from, const int32_t *outputs, int64_t count, const matrix *to, int64_t first) {
    if (from->inputs != to->inputs) return INVALID;
    for (int64_t i = 0; i < count; i++)
        if (outputs[i] < 0 || outputs[i] >= from->outputs) return INVALID;
    float *row = malloc((size_t)from->inputs * sizeof *row);
    if (!row) return NO_MEMORY;
    int result = DONE;
    for (int64_t i = 0; i < count && result == DONE; i++) {
        read_row(from, outputs[i], row);
        result = write_rows(to, first + i, 1, row);
    }
    free(row);
    return result;
}
