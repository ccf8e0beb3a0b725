/* Comparison with scalar code, once after compiling */
#include "matrices.h"

static uint16_t to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static uint32_t random_bits(uint32_t *seed) { return *seed = *seed * 1664525u + 1013904223u; }

/* Store the integer v, or its lowest bits, as weight (k, n) of `m`. */
static void set_weight(const matrix *m, int64_t k, int64_t n, int v) {
    int shift;
    int64_t at = position(m, n, k, &shift);
    switch (m->form) {
    case F32: ((float *)m->weights)[at] = (float)v; break;
    case BF16: ((uint16_t *)m->weights)[at] = to_bf16((float)v); break;
    case F16: { /* v = mantissa * 2^exponent */
        int a = v < 0 ? -v : v, e = 0;
        while (a >> (e + 1)) e++;
        ((uint16_t *)m->weights)[at] = a ? (uint16_t)((v < 0) << 15 | (e + 15) << 10 | (a << (10 - e) & 0x3ff)) : 0;
        break;
    }
    case INT8:
    case Q8_0:
    case Q6_K: ((uint8_t *)m->weights)[at] = (uint8_t)(v + FORMATS[m->form].offset); break;
    default: ((uint8_t *)m->weights)[at] |= (uint8_t)((v & 15) << shift);
    }
}

static int functions_are_exact(void) {
    for (int i = -2560; i <= 2560; i++) {
        double x = i / 128.0, inner = 0.79788456080286536 * (x + 0.044715 * x * x * x);
        double expected[] = {x / (1 + exp(-x)), 0.5 * x * (1 + tanh(inner)), 0.5 * x * erfc(-x * 0.70710678118654752),
                             tanh(x)};
        vf v = fill((float)x),
           actual[] = {activate(SILU, v), activate(GELU_TANH, v), activate(GELU_ERF, v), hyperbolic_tangent(v)};
        for (int f = 0; f < 4; f++)
            if (!(fabs(actual[f][LANES - 1] - expected[f]) <= 1e-6 * (0.1 + fabs(expected[f])))) return 0;
    }
    return 1;
}

static int32_t first_largest(const float *logits, int64_t count) {
    int32_t token;
    float value;
    largest_logits(logits, 1, count, count, &token, &value);
    return token;
}

/* Compare with sorted logits in double precision. */
static int sampling_is_exact(void) {
    enum { COUNT = 3 * LANES + 1, TOP_K = 2 * LANES };
    float logits[COUNT], probs[COUNT], scratch[COUNT];
    double expected[COUNT], sum = 0, mass = 0;
    for (int i = 0; i < COUNT; i++)
        logits[i] = -0.05f * (float)(i * 11 % COUNT); /* largest first after a permutation */
    for (int rank = 0; rank < TOP_K; rank++) sum += exp(-0.1 * rank);
    sampling s = {.temperature = 0.5f, .top_p = 0.8, .top_k = TOP_K};
    distributions(logits, 1, COUNT, COUNT, &s, probs, scratch);
    for (int rank = 0; rank < COUNT; rank++) {
        expected[rank] = rank < TOP_K && mass < 0.8 * sum ? exp(-0.1 * rank) : 0;
        mass += expected[rank];
    }
    double before = 0;
    for (int i = 0; i < COUNT; i++) {
        double p = expected[i * 11 % COUNT] / mass;
        if (!(fabs(probs[i] - p) <= 1e-6)) return 0;
        if (p > 0 && invert(probs, COUNT, before + p / 2) != i) return 0;
        before += p;
    }
    logits[LANES + 1] = 1;
    if (first_largest(logits, COUNT) != LANES + 1) return 0;
    logits[COUNT - 1] = NAN;
    return first_largest(logits, COUNT) == COUNT - 1;
}

/* Compare the products of every form with scalar sums. Returns 0 if equal within rounding; used once after compiling.
 */
int self_check(void) {
    enum { K = STRIP + TILE_INPUTS, N = 5 * BLOCK, ROWS = TILE_ROWS + 3 };
    static float weights[K * N], values[K * N], x[ROWS * K], scales[N * K / 16], codes[16], o[ROWS * UNIT],
        x_scales[ROWS * K / 16];
    static correction corrections[ROWS * K / 16];
    static uint16_t halves[2 * N * K / EXACT];
    static uint8_t code_bytes[32];
    static int16_t quantised[ROWS * K];
    uint32_t seed = 1;
    if (!functions_are_exact() || !sampling_is_exact()) return 1 + FORMAT_COUNT;
    for (int i = 0; i < 16; i++) codes[i] = (float)(i - 7) / 9.0f;
    set_code_bytes(codes, code_bytes);
    for (int i = 0; i < N * K / 16; i++) scales[i] = 1.0f + (float)(i % 97) / 64.0f;
    for (int i = 0; i < 2 * N * K / EXACT; i++)
        halves[i] = (uint16_t)(0x3c00 + random_bits(&seed) % 0x400); /* 1 to 2 */
    for (int i = 0; i < ROWS * K; i++)
        x[i] = i % 16 ? (float)(random_bits(&seed) % 255) - 127.0f : 127.0f; /* exact in 8 bits */
    for (int kind = 0; kind < FORMAT_COUNT + FORMAT_COUNT - Q8_0; kind++) {
        int narrow = kind >= FORMAT_COUNT, form = narrow ? kind - FORMAT_COUNT + Q8_0 : kind;
        matrix m = {weights, FORMATS[form].scale_form == F16 ? (void *)halves : (void *)scales,
                    codes,   code_bytes,
                    0,       form,
                    N,       K,
                    narrow};
        activations a = {quantised, x_scales, corrections};
        for (int r = 0; is_coded(form) && r < ROWS; r++) {
            int64_t groups = r * (K / group_inputs(&m)), size = activation_bytes(&m);
            quantise_inputs(&m, 0, K, x + r * K, (char *)quantised + r * K * size, x_scales + groups,
                            corrections + groups);
        }
        memset(weights, 0, sizeof weights);
        for (int i = 0; i < K * N; i++) set_weight(&m, i / N, i % N, (int)(random_bits(&seed) >> 25) - 64);
        for (int n = 0; n < N; n++) read_row(&m, n, values + n * K);
        for (int rows = 1; rows <= ROWS; rows++)
            for (int first = 0; first <= UNIT_BLOCKS; first += UNIT_BLOCKS) {
                int blocks = first ? N / BLOCK - UNIT_BLOCKS : UNIT_BLOCKS;
                if (!is_coded(form))
                    float_product(&m, first, blocks, x, K, rows, o);
                else if (form == INT8)
                    byte_product(&m, first, blocks, a, rows, o);
                else
                    coded_product(&m, first, blocks, a, rows, o);
                for (int r = 0; r < rows; r++)
                    for (int j = 0; j < blocks * BLOCK; j++) {
                        double sum = 0;
                        for (int k = 0; k < K; k++) sum += (double)values[(first * BLOCK + j) * K + k] * x[r * K + k];
                        double rounding = form == CODE4 ? 5e-4 : 1e-5; /* of codes */
                        if (!(fabs(o[r * UNIT + j] - sum) <= rounding * (1e4 + fabs(sum)))) return 1 + form;
                    }
            }
    }
    return 0;
}
