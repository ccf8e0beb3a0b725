/* Access to single weights */
#include "formats.h"

/* Index in `weights` of input k and output n, in numbers or bytes; `shift`: first bit in the byte */
int64_t position(const matrix *m, int64_t n, int64_t k, int *shift) {
    int64_t b = n / BLOCK, j = n % BLOCK, inputs = m->inputs;
    *shift = 0;
    if (has_bytes(m->form)) return (b * ((inputs + 3) / 4) + k / 4) * 4 * BLOCK + 4 * j + k % 4;
    if (m->form == CODE4 && !WORD_CODES) {
        *shift = 4 * (k / 2 % 2);
        int64_t vectors = j / (2 * LANES) * 4 * LANES, place = j % LANES / 4 * 16 + j / LANES % 2 * 8 + j % 4 * 2;
        return (b * inputs + k / 4 * 4) * BLOCK / 2 + vectors + place + k % 2;
    }
    if (bits_of(m->form) == 4) {
        *shift = 4 * (k / 4 % 2);
        return (b * inputs + k / 8 * 8) * BLOCK / 2 + 4 * j + k % 4;
    }
    if (m->form == BF16) j = j / (2 * LANES) * 2 * LANES + j % LANES * 2 + j / LANES % 2;
    return (b * inputs + k) * BLOCK + j;
}

static float read_number(int form, const void *numbers, int64_t i) {
    if (form == F32) return ((const float *)numbers)[i];
    uint16_t copies[LANES];
    for (int lane = 0; lane < LANES; lane++) copies[lane] = ((const uint16_t *)numbers)[i];
    return load_as(form, copies, 0)[0];
}

/* o = weights of output n and a group of inputs */
static void read_group(const matrix *m, int64_t n, int64_t group, float *o) {
    const format *f = FORMATS + m->form;
    int64_t count = group_inputs(m), at = (n / BLOCK * (m->inputs / count) + group) * f->scales * BLOCK + n % BLOCK;
    float scale = read_number(f->scale_form, m->scales, at);
    float minimum = has_minimum(m->form) ? read_number(f->scale_form, m->scales, at + BLOCK) : 0;
    for (int64_t i = 0; i < count; i++) {
        int shift, byte = ((const uint8_t *)m->weights)[position(m, n, group * count + i, &shift)];
        int code = has_bytes(m->form) ? byte : byte >> shift & 15;
        o[i] = (m->form == CODE4 ? m->codes[code] : (float)(code - f->offset)) * scale + minimum;
    }
}

/* o[inputs] = weights of output n */
void read_row(const matrix *m, int64_t n, float *o) {
    int shift;
    if (is_coded(m->form))
        for (int64_t group = 0; group < m->inputs / group_inputs(m); group++)
            read_group(m, n, group, o + group * group_inputs(m));
    else
        for (int64_t k = 0; k < m->inputs; k++) o[k] = read_number(m->form, m->weights, position(m, n, k, &shift));
}

/* Weights of some outputs, [count][inputs] */
void matrix_rows(const matrix *m, const int64_t *outputs, int64_t count, float *rows) {
    for (int64_t r = 0; r < count; r++) read_row(m, outputs[r], rows + r * m->inputs);
}
