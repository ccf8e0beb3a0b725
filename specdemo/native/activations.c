/* Quantisation of activations: integers with one scale per group of inputs */
#include "lookup.h"
#include "products.h"

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
