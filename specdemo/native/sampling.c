/* Distributions of the next token, and samples from them. */
#include "sampling.h"
#include "interface.h"
#include "vectors.h"

typedef float vn __attribute__((vector_size(2 * LANES))); /* half of a vector */
typedef double vd __attribute__((vector_size(4 * LANES)));

/* Sum of the numbers not below `limit` */
INLINE double mass_from(const float *x, int64_t count, float limit) {
    vd sums[2] = {{0}};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        float v[LANES];
        store(v, choose(load(x + i) >= limit, load(x + i), fill(0)));
        for (int half = 0; half < 2; half++) {
            vn part;
            memcpy(&part, v + half * LANES / 2, sizeof part);
            sums[half] += __builtin_convertvector(part, vd);
        }
    }
    double mass = 0;
    sums[0] += sums[1];
    for (int j = 0; j < LANES / 2; j++) mass += sums[0][j];
    for (; i < count; i++) mass += x[i] >= limit ? x[i] : 0;
    return mass;
}
static double mass_of(const float *x, int64_t count) { return mass_from(x, count, 0); }
static double number_from(const float *x, int64_t count, float limit) {
    vi number = {0};
    int64_t i = 0, sum = 0;
    for (; i + LANES <= count; i += LANES) number -= load(x + i) >= limit;
    for (int j = 0; j < LANES; j++) sum += number[j];
    for (; i < count; i++) sum += x[i] >= limit;
    return (double)sum;
}

/* First index of the largest number, or of NaN */
static int32_t first_largest(const float *x, int64_t count) {
    vf peak = fill(-INFINITY);
    vi at = {0}, index, broken = {0};
    int64_t i = 0;
    for (int j = 0; j < LANES; j++) index[j] = j;
    for (; i + LANES <= count; i += LANES, index += LANES) {
        vf v = load(x + i);
        vi above = v > peak;
        peak = choose(above, v, peak), at = (vi)choose(above, (vf)index, (vf)at), broken |= v != v;
    }
    int invalid = 0;
    for (int j = 0; j < LANES; j++) invalid |= broken[j];
    for (int64_t j = invalid ? 0 : i; j < count; j++)
        if (x[j] != x[j]) return (int32_t)j;
    float most = -INFINITY;
    int32_t best = 0;
    for (int j = 0; j < LANES; j++)
        if (peak[j] > most || (peak[j] == most && at[j] < best)) most = peak[j], best = at[j];
    for (; i < count; i++)
        if (x[i] > most) most = x[i], best = (int32_t)i;
    return best;
}

/* Most probable token of each row, and its logit */
void largest_logits(const float *logits, int64_t rows, int64_t stride, int64_t count, int32_t *tokens, float *values) {
    for (int64_t r = 0; r < rows; r++) {
        tokens[r] = first_largest(logits + r * stride, count);
        values[r] = logits[r * stride + tokens[r]];
    }
}

/* Bits of a float as an integer with the same order */
INLINE int32_t ordered(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ (bits >> 31 & 0x7fffffff);
}
INLINE float from_ordered(int32_t key) {
    float x;
    key ^= key >> 31 & 0x7fffffff;
    memcpy(&x, &key, sizeof x);
    return x;
}

/* Largest number from `low` to `high` for which the numbers not below it weigh at least `needed` (by bisection). */
INLINE float threshold(double (*weight)(const float *, int64_t, float), const float *x, int64_t count, float low,
                       float high, double needed) {
    int64_t least = ordered(low), end = (int64_t)ordered(high) + 1;
    while (end - least > 1) {
        int64_t middle = least + (end - least) / 2;
        if (weight(x, count, from_ordered((int32_t)middle)) >= needed)
            least = middle;
        else
            end = middle;
    }
    return from_ordered((int32_t)least);
}

/* Set all but the `top_k` largest logits to -infinity; values equal to the smallest of them stay. */
static void keep_largest(float *x, int64_t count, int64_t top_k) {
    float limit = threshold(number_from, x, count, -INFINITY, x[first_largest(x, count)], (double)top_k);
    for (int64_t i = 0; i < count; i++) x[i] = x[i] < limit ? -INFINITY : x[i];
}

/* Replace logits by exp(x - largest); returns their sum. */
static double exponentiate(float *x, int64_t count) {
    float most = x[first_largest(x, count)];
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf v = load(x + i) - most;
        store(x + i, choose(v < -87.0f, fill(0), exponential(v)));
    }
    for (; i < count; i++) x[i] = x[i] - most < -87.0f ? 0 : exponential(fill(x[i] - most))[0];
    return mass_of(x, count);
}

static double mass_above(const float *x, int64_t count, float limit) { return mass_from(x, count, limit); }

/* Keep the smallest set of the largest numbers that weighs `needed`, of equal ones the first; returns its sum. */
static double keep_nucleus(float *x, int64_t count, double sum, double needed, float *scratch) {
    float least =
        (float)((sum - needed) / (double)count) * 0.999f; /* all smaller numbers together weigh less than the rest */
    int64_t candidates = 0;
    for (int64_t i = 0; i < count; i++) {
        scratch[candidates] = x[i];
        candidates += x[i] >= least;
    }
    float limit = threshold(mass_above, scratch, candidates, least, 1, needed);
    float next = from_ordered(ordered(limit) + 1);
    double above = mass_from(scratch, candidates, next),
           equal = number_from(scratch, candidates, limit) - number_from(scratch, candidates, next);
    double retained = fmin(equal, fmax(1, ceil((needed - above) / limit)));
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(x + i, choose(load(x + i) >= limit, load(x + i), fill(0)));
    for (; i < count; i++) x[i] = x[i] >= limit ? x[i] : 0;
    for (double surplus = equal - retained; surplus > 0;)
        if (x[--i] == limit) x[i] = 0, surplus--;
    return above + retained * limit;
}

/* probs[rows][count]: temperature, top-k (0: all), top-p and softmax; scratch[count] */
void distributions(const float *logits, int64_t rows, int64_t stride, int64_t count, float temperature, int64_t top_k,
                   double top_p, float *probs, float *scratch) {
    for (int64_t r = 0; r < rows; r++) {
        const float *x = logits + r * stride;
        float *p = probs + r * count;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) store(p + i, load(x + i) / temperature);
        for (; i < count; i++) p[i] = x[i] / temperature;
        if (top_k > 0 && top_k < count) keep_largest(p, count, top_k);
        double sum = exponentiate(p, count);
        if (top_p < 1) sum = keep_nucleus(p, count, sum, top_p * sum, scratch);
        float factor = (float)(1 / sum);
        for (i = 0; i + LANES <= count; i += LANES) store(p + i, load(p + i) * factor);
        for (; i < count; i++) p[i] *= factor;
    }
}

/* Softmax of the largest logit, `peak` */
double largest_probability(const float *logits, int64_t count, float peak) {
    vf sum = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sum += exponential(load(logits + i) - peak);
    double mass = total(sum);
    for (; i < count; i++) mass += exponential(fill(logits[i] - peak))[0];
    return 1 / mass;
}

/* Invert the cumulative distribution of `probs`, which need not be normalised, at `uniform` in [0, 1). */
int64_t invert(const float *probs, int64_t count, double uniform) {
    enum { PART = 16 * LANES };
    double target = uniform * mass_of(probs, count), before = 0;
    for (int64_t start = 0; start < count; start += PART) {
        int64_t end = start + PART < count ? start + PART : count;
        double mass = mass_of(probs + start, end - start), sum = before;
        for (int64_t i = start; before + mass > target && i < end; i++)
            if ((sum += probs[i]) > target) return i;
        before += mass;
    }
    while (count > 1 && !(probs[count - 1] > 0)) count--; /* the sum was rounded */
    return count - 1;
}

INLINE vf lesser(vf a, vf b) { return choose(a < b, a, b); }

/* Sum of min(p, q) */
static double overlap(const float *p, const float *q, int64_t count) {
    enum { PART = 16 * LANES };
    double sum = 0;
    int64_t i = 0;
    for (; i + PART <= count; i += PART) {
        vf part = {0};
        for (int j = 0; j < PART; j += LANES) part += lesser(load(p + i + j), load(q + i + j));
        sum += total(part);
    }
    for (; i < count; i++) sum += p[i] < q[i] ? p[i] : q[i];
    return sum;
}

/* Per node of a draft: p of its token, and sum min(p, q) at its position; p[n + 1][count], q[n][count].
 * Returns a `result`. */
int compare_drafts(const float *p, const float *q, int64_t count, int64_t n, const int32_t *parents,
                   const int32_t *tokens, float *token_probs, float *overlaps) {
    for (int64_t i = 0; i < n; i++)
        if (parents[i] < -1 || parents[i] >= i || tokens[i] < 0 || tokens[i] >= count) return INVALID;
    for (int64_t i = 0; i < n; i++) {
        const float *row = p + (parents[i] + 1) * count;
        token_probs[i] = row[tokens[i]];
        overlaps[i] = (float)overlap(row, q + i * count, count);
    }
    return DONE;
}

/* Sum of max(weight p - q, 0) */
double excess(const float *p, const float *q, float weight, int64_t count) {
    enum { PART = 16 * LANES };
    double sum = 0;
    int64_t i = 0;
    for (; i + PART <= count; i += PART) {
        vf part = {0};
        for (int j = 0; j < PART; j += LANES) part += larger(weight * load(p + i + j) - load(q + i + j), fill(0));
        sum += total(part);
    }
    for (; i < count; i++) sum += weight * p[i] > q[i] ? weight * p[i] - q[i] : 0;
    return sum;
}

/* o = max(weight p - q, 0), normalised; returns its sum before. */
double residual(const float *p, const float *q, float weight, int64_t count, float *o) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(o + i, larger(weight * load(p + i) - load(q + i), fill(0)));
    for (; i < count; i++) o[i] = weight * p[i] > q[i] ? weight * p[i] - q[i] : 0;
    double sum = mass_of(o, count);
    float factor = sum > 0 ? (float)(1 / sum) : 0;
    for (i = 0; i + LANES <= count; i += LANES) store(o + i, load(o + i) * factor);
    for (; i < count; i++) o[i] *= factor;
    return sum;
}

/* Compare with sorted logits in double precision. Returns 1 if equal within rounding; used once after compiling. */
int sampling_is_exact(void) {
    enum { COUNT = 3 * LANES + 1, TOP_K = 2 * LANES };
    float logits[COUNT], probs[COUNT], scratch[COUNT];
    double expected[COUNT], sum = 0, mass = 0;
    for (int i = 0; i < COUNT; i++)
        logits[i] = -0.05f * (float)(i * 11 % COUNT); /* largest first after a permutation */
    for (int rank = 0; rank < TOP_K; rank++) sum += exp(-0.1 * rank);
    distributions(logits, 1, COUNT, COUNT, 0.5f, TOP_K, 0.8, probs, scratch);
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
