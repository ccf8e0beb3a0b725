/* Access to single weights */
#include "formats.h"

/* Formats up to one without name */
const format *format_table(void) {
    static format table[FORMAT_COUNT + 1];
    memcpy(table, FORMATS, sizeof FORMATS);
    return table;
}

/* Index in `weights` of input k and output n, in numbers or bytes; `shift`: first bit in the byte */
int64_t position(const matrix *m, int64_t n, int64_t k, int *shift) {
    int64_t b = n / BLOCK, j = n % BLOCK, inputs = m->inputs;
    *shift = FORMATS[m->form].bits == 4 ? 4 * (k / 2 % 2) : 0;
    if (has_bytes(m->form)) return (b * ((inputs + 3) / 4) + k / 4) * 4 * BLOCK + 4 * j + k % 4;
    if (m->form == CODE4) {
        int64_t vectors = j / (2 * LANES) * 4 * LANES, place = j % LANES / 4 * 16 + j / LANES % 2 * 8 + j % 4 * 2;
        return (b * inputs + k / 4 * 4) * BLOCK / 2 + vectors + place + k % 2;
    }
    if (FORMATS[m->form].bits == 4) return (b * inputs + k / 8 * 8) * BLOCK / 2 + 4 * j + k % 2 * 2 + k / 4 % 2;
    if (m->form == BF16) j = j / (2 * LANES) * 2 * LANES + j % LANES * 2 + j / LANES % 2;
    return (b * inputs + k) * BLOCK + j;
}

static float read_number(int form, const void *numbers, int64_t i) {
    if (form == F32) return ((const float *)numbers)[i];
    uint16_t copies[LANES];
    for (int lane = 0; lane < LANES; lane++) copies[lane] = ((const uint16_t *)numbers)[i];
    return load_as(form, copies, 0)[0];
}

float weight_of(const matrix *m, int64_t n, int64_t k) {
    int shift;
    int64_t at = position(m, n, k, &shift), b = n / BLOCK, j = n % BLOCK;
    const format *f = FORMATS + m->form;
    if (!is_coded(m->form)) return read_number(m->form, m->weights, at);
    int byte = ((const uint8_t *)m->weights)[at], code = byte >> shift & 15;
    int64_t groups = m->inputs / group_inputs(m), first = (b * groups + k / group_inputs(m)) * f->scales * BLOCK + j;
    float scale = read_number(f->scale_form, m->scales, first);
    if (m->form == CODE4) return m->codes[code] * scale;
    float value = (has_bytes(m->form) ? (int8_t)byte : code - f->offset) * scale;
    return has_minimum(m->form) ? value + read_number(f->scale_form, m->scales, first + BLOCK) : value;
}
