/* Rows of floats and stored numbers: reading and writing weights, and quantisation of activations */
#include "matrices.h"
#include <stdlib.h>

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

/* Activations: integers with one scale per group of inputs */

#define CODE_PEAK 32767 /* integer of the largest code */

static float code_peak(const float *codes) {
    float peak = 0;
    for (int c = 0; c < 16; c++) peak = fabsf(codes[c]) > peak ? fabsf(codes[c]) : peak;
    return peak;
}
/* Store the bytes of the integers nearest to the codes, scaled to CODE_PEAK. */
void set_code_bytes(const float *codes, uint8_t *bytes) {
    for (int c = 0; c < 16; c++) {
        int value = (int)lrintf(codes[c] * (CODE_PEAK / code_peak(codes)));
        bytes[c] = (uint8_t)value, bytes[16 + c] = (uint8_t)(value >> 8);
    }
}

#define NARROW_PEAK 127 /* of integers of 8 bits */

/* Integers of a group of activations: their sum, and the value of 1, NaN if there are NaN or infinity */
typedef struct {
    float scale;
    int32_t sum;
} quantised;

/* Store the integers nearest to x / |peak of x| * limit in `bytes` bytes each. */
INLINE quantised quantise(const float *x, int64_t width, int limit, int bytes, void *to) {
    vi peaks = {0}, integers = {0}; /* bits of |x|: larger for NaN and infinity than for numbers */
    int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) peaks = larger_integers(peaks, (vi)load(x + i) & 0x7fffffff);
    int32_t bits = largest_integer(peaks);
    for (int64_t i = whole; i < width; i++) {
        int32_t next;
        memcpy(&next, x + i, sizeof next);
        bits = (next & 0x7fffffff) > bits ? next & 0x7fffffff : bits;
    }
    float peak;
    memcpy(&peak, &bits, sizeof peak);
    if (!(peak < INFINITY)) peak = NAN;
    float factor = peak > 1e-30f ? (float)limit / peak : 0;
    for (int64_t i = 0; i < whole; i += LANES) {
        vi q = __builtin_convertvector(nearest(load(x + i) * factor), vi);
        integers += q;
        if (bytes == 1) {
            vc c = __builtin_convertvector(q, vc);
            memcpy((int8_t *)to + i, &c, sizeof c);
        } else {
            vh h = __builtin_convertvector(q, vh);
            memcpy((int16_t *)to + i, &h, sizeof h);
        }
    }
    int32_t sum = sum_of(integers);
    for (int64_t i = whole; i < width; i++) {
        int32_t q = (int32_t)(x[i] * factor + 12582912.0f - 12582912.0f);
        if (bytes == 1)
            ((int8_t *)to)[i] = (int8_t)q;
        else
            ((int16_t *)to)[i] = (int16_t)q;
        sum += q;
    }
    return (quantised){peak / (float)limit, sum};
}

/* Order of every four words in products of bytes: four lower, then four upper bytes, all signed; in products of words:
 * the first and third, then the second and fourth word. */
INLINE vq arranged(int split, vq fours) {
    if (split) {
        fours = (vq)((vw)fours + 0x80) ^ 0x0080008000800080; /* add the lower byte's sign to the upper byte */
        vq differing = (fours ^ fours >> 8) & 0x0000ff000000ff00;
        fours ^= differing ^ differing << 8;
    }
    return (fours & 0xffff00000000ffff) | (fours << 16 & 0xffff00000000) | (fours >> 16 & 0xffff0000);
}

INLINE void arrange(int split, int16_t *words, int64_t count) { /* a multiple of four */
    vq fours = {0};
    int64_t i = 0;
    for (; i + (int64_t)sizeof fours / 2 <= count; i += sizeof fours / 2) {
        memcpy(&fours, words + i, sizeof fours);
        fours = arranged(split, fours);
        memcpy(words + i, &fours, sizeof fours);
    }
    if (i == count) return;
    memcpy(&fours, words + i, 2 * (count - i));
    fours = arranged(split, fours);
    memcpy(words + i, &fours, 2 * (count - i));
}

/* Groups from `first` to `end` */
INLINE void quantise_groups(const matrix *m, int64_t group, int64_t first, int64_t end, const float *x, char *to,
                            float *scales, correction *corrections) {
    const format *f = FORMATS + m->form;
    int64_t size = activation_bytes(m);
    float factor = m->form == CODE4 ? code_peak(m->codes) / CODE_PEAK : 1;
    for (int64_t g = first; g < end; g++) {
        quantised q = size == 1 ? quantise(x + g * group, group, NARROW_PEAK, 1, to + g * group)
                                : quantise(x + g * group, group, f->activation_peak, 2, to + g * group * 2);
        scales[g] = q.scale * factor;
        if (f->scales == 2)
            corrections[g].sum = (float)q.sum * q.scale;
        else
            corrections[g].offset = -f->offset * q.sum;
    }
}

/* Activations of one row of `m` in the order of its weights: inputs from `first` to `end`, whole groups */
void quantise_inputs(const matrix *m, int64_t first, int64_t end, const float *x, void *to, float *scales,
                     correction *corrections) {
    int64_t stride = activation_stride(m), size = activation_bytes(m), group = group_inputs(m);
    if (end == m->inputs && end < stride) memset((char *)to + end * size, 0, (stride - end) * size);
    switch (group) {
    case 16: quantise_groups(m, 16, first / 16, end / 16, x, to, scales, corrections); break;
    case 32: quantise_groups(m, 32, first / 32, end / 32, x, to, scales, corrections); break;
    default: quantise_groups(m, group, first / group, end / group, x, to, scales, corrections);
    }
    if (size == 1 || (m->form == CODE4 && !WORD_CODES)) return;
    int64_t count = (end == m->inputs ? stride : end) - first;
    if (SPLIT && m->form != CODE4)
        arrange(1, (int16_t *)to + first, count);
    else
        arrange(0, (int16_t *)to + first, count);
}
