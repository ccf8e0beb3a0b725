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

/* Store the integers nearest to x / |peak of x| * limit and their sum; return the value of 1, NaN if x contains NaN or
 * infinity. */
INLINE float quantise(const float *x, int64_t width, int limit, int bytes, void *to, int32_t *sum) {
    vf peaks = {0}, broken = {0};
    int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        vf v = load(x + i);
        peaks = larger(larger(v, -v), peaks), broken += v * 0.0f;
    }
    float peak = largest(peaks), invalid = total(broken);
    for (int64_t i = whole; i < width; i++) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak, invalid += x[i] * 0.0f;
    float factor = peak > 1e-30f ? (float)limit / peak : 0;
    vi integers = {0};
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
    *sum = 0;
    for (int i = 0; i < LANES; i++) *sum += integers[i];
    for (int64_t i = whole; i < width; i++) {
        int32_t q = (int32_t)(x[i] * factor + 12582912.0f - 12582912.0f);
        if (bytes == 1)
            ((int8_t *)to)[i] = (int8_t)q;
        else
            ((int16_t *)to)[i] = (int16_t)q;
        *sum += q;
    }
    return peak / (float)limit + invalid;
}

/* Swap the second and third of every four words, see stored_words. */
INLINE vq swapped(vq four) {
    return (four & 0xffff00000000ffff) | (four << 16 & 0xffff00000000) | (four >> 16 & 0xffff0000);
}
static void swap_middle(int16_t *words, int64_t count) {
    int64_t i = 0;
    vq fours;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        memcpy(&fours, words + i, sizeof fours);
        fours = swapped(fours);
        memcpy(words + i, &fours, sizeof fours);
    }
    for (; i < count; i += 4) {
        int16_t second = words[i + 1];
        words[i + 1] = words[i + 2], words[i + 2] = second;
    }
}

/* Activations of one row of `m` in the order of its weights */
void quantise_row(const matrix *m, const float *x, void *to, float *scales, int32_t *sums) {
    int64_t group = group_inputs(m), stride = activation_stride(m), size = activation_bytes(m->form);
    float factor = m->form == CODE4 ? code_peak(m->codes) / CODE_PEAK : 1;
    memset((char *)to + m->inputs * size, 0, (stride - m->inputs) * size);
    for (int64_t g = 0; g < m->inputs / group; g++)
        scales[g] = quantise(x + g * group, group, FORMATS[m->form].activation_peak, (int)size,
                             (char *)to + g * group * size, sums + g) *
                    factor;
    if (has_bytes(m->form) && size == 2) swap_middle(to, stride);
}
