/* Distributions of the next token, and samples from them. */
#include "vectors.h"

typedef float vn __attribute__((vector_size(2 * LANES))); /* half of a vector */
typedef double vd __attribute__((vector_size(4 * LANES)));

/* Add the halves of `v` in double precision, and store `v`. */
INLINE void add_halves(vd sums[2], vf v, float *stored) {
    store(stored, v);
    for (int half = 0; half < 2; half++) {
        vn part;
        memcpy(&part, stored + half * LANES / 2, sizeof part);
        sums[half] += __builtin_convertvector(part, vd);
    }
}
INLINE double sum_of_halves(vd sums[2]) {
    double mass = 0;
    vd both = sums[0] + sums[1];
    for (int j = 0; j < LANES / 2; j++) mass += both[j];
    return mass;
}

/* Sum of the numbers not below `limit` */
INLINE double mass_from(const float *x, int64_t count, float limit) {
    vd sums[2] = {{0}};
    float v[LANES];
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) add_halves(sums, choose(load(x + i) >= limit, load(x + i), fill(0)), v);
    double mass = sum_of_halves(sums);
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
    vf peaks[2] = {fill(-INFINITY), fill(-INFINITY)};
    vi broken = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES)
        for (int n = 0; n < 2; n++) {
            vf v = load(x + i + n * LANES);
            peaks[n] = larger(v, peaks[n]), broken |= v != v;
        }
    float peak = largest(larger(peaks[0], peaks[1]));
    int invalid = largest_integer(-broken);
    for (; i < count; i++) {
        invalid |= x[i] != x[i];
        peak = x[i] > peak ? x[i] : peak;
    }
    for (i = 0; !invalid && i + LANES <= count; i += LANES)
        if (largest_integer(-(load(x + i) == peak))) break;
    while (invalid ? x[i] == x[i] : x[i] != peak) i++;
    return (int32_t)i;
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

enum { PART = 16 * LANES };

/* Largest of PART numbers */
INLINE float largest_of_part(const float *x) {
    vf peaks = load(x);
    for (int j = LANES; j < PART; j += LANES) peaks = larger(load(x + j), peaks);
    return largest(peaks);
}

/* p = exp(x / temperature - most), where `most` is the largest quotient; returns the sum. */
static double exponentiate(const float *x, int64_t count, float temperature, float most, float *p) {
    const float least = -87.0f;
    vd sums[2] = {{0}};
    int64_t i = 0;
    for (; i + PART <= count; i += PART) {
        if (largest_of_part(x + i) / temperature - most < least) {
            memset(p + i, 0, PART * sizeof *p);
            continue;
        }
        for (int j = 0; j < PART; j += LANES) {
            vf v = load(x + i + j) / temperature - most;
            add_halves(sums, choose(v < least, fill(0), exponential(v)), p + i + j);
        }
    }
    for (; i + LANES <= count; i += LANES) {
        vf v = load(x + i) / temperature - most;
        add_halves(sums, choose(v < least, fill(0), exponential(v)), p + i);
    }
    double mass = sum_of_halves(sums);
    for (; i < count; i++) {
        float v = x[i] / temperature - most;
        mass += p[i] = v < least ? 0 : exponential(fill(v))[0];
    }
    return mass;
}

static double mass_above(const float *x, int64_t count, float limit) { return mass_from(x, count, limit); }

/* Least number of the smallest set of the largest numbers that weighs `needed`; of numbers equal to it, the last are
 * set to 0. Stores the weight of the set in `sum`. */
static float nucleus(float *x, int64_t count, double needed, double *sum, float *scratch) {
    float least =
        (float)((*sum - needed) / (double)count) * 0.999f; /* all smaller numbers together weigh less than the rest */
    int64_t candidates = 0;
    for (int64_t i = 0; i < count;) {
        int64_t end = i + PART <= count ? i + PART : count;
        if (end - i == PART && largest_of_part(x + i) < least) i = end;
        for (; i < end; i++) {
            scratch[candidates] = x[i];
            candidates += x[i] >= least;
        }
    }
    float limit = threshold(mass_above, scratch, candidates, least, 1, needed);
    float next = from_ordered(ordered(limit) + 1);
    double above = mass_from(scratch, candidates, next),
           equal = number_from(scratch, candidates, limit) - number_from(scratch, candidates, next);
    double retained = fmin(equal, fmax(1, ceil((needed - above) / limit)));
    int64_t i = count;
    for (double surplus = equal - retained; surplus > 0;)
        if (x[--i] == limit) x[i] = 0, surplus--;
    *sum = above + retained * limit;
    return limit;
}

/* p[count]: temperature, top-k, top-p, min-p and softmax of x[count], whose largest logit is x[best]; scratch[count] */
void distribution(const float *x, int64_t count, int32_t best, const sampling *s, float *p, float *scratch) {
    float temperature = s->temperature, most = x[best] / temperature, limit = 0;
    double sum;
    int64_t i = 0;
    if (s->top_k > 0 && s->top_k < count) {
        for (; i + LANES <= count; i += LANES) store(p + i, load(x + i) / temperature);
        for (; i < count; i++) p[i] = x[i] / temperature;
        keep_largest(p, count, s->top_k);
        sum = exponentiate(p, count, 1, most, p);
    } else {
        sum = exponentiate(x, count, temperature, most, p);
    }
    if (s->top_p < 1) limit = nucleus(p, count, s->top_p * sum, &sum, scratch);
    float least = (float)(s->min_p * p[best]);
    if (least > limit) {
        limit = least;
        sum = mass_from(p, count, limit);
    }
    float factor = (float)(1 / sum);
    for (i = 0; i + LANES <= count; i += LANES)
        store(p + i, choose(load(p + i) >= limit, load(p + i) * factor, fill(0)));
    for (; i < count; i++) p[i] = p[i] >= limit ? p[i] * factor : 0;
}

/* probs[rows][count] of logits[rows] at distances of `stride` */
void distributions(const float *logits, int64_t rows, int64_t stride, int64_t count, const sampling *s, float *probs,
                   float *scratch) {
    for (int64_t r = 0; r < rows; r++) {
        const float *x = logits + r * stride;
        distribution(x, count, first_largest(x, count), s, probs + r * count, scratch);
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

/* As `compare_drafts`, with q[n][size] of the tokens ids[size]. */
int compare_sparse_drafts(const float *p, const int64_t *ids, const float *q, int64_t size, int64_t count, int64_t n,
                          const int32_t *parents, const int32_t *tokens, float *token_probs, float *overlaps) {
    for (int64_t i = 0; i < n; i++)
        if (parents[i] < -1 || parents[i] >= i || tokens[i] < 0 || tokens[i] >= count) return INVALID;
    for (int64_t i = 0; i < n; i++) {
        const float *row = p + (parents[i] + 1) * count;
        double sum = 0;
        for (int64_t k = 0; k < size; k++, q++) {
            if ((uint64_t)ids[k] >= (uint64_t)count) return INVALID;
            if (*q > 0) sum += row[ids[k]] < *q ? row[ids[k]] : *q;
        }
        token_probs[i] = row[tokens[i]];
        overlaps[i] = (float)sum;
    }
    return DONE;
}

/* Rank of the token of each node after its parent, from 1; p[n + 1][count]. Returns a `result`. */
int token_ranks(const float *p, int64_t count, int64_t n, const int32_t *parents, const int32_t *tokens,
                int32_t *ranks) {
    for (int64_t i = 0; i < n; i++) {
        if (parents[i] < -1 || parents[i] >= i || tokens[i] < 0 || tokens[i] >= count) return INVALID;
        const float *row = p + (parents[i] + 1) * count;
        float next = from_ordered(ordered(row[tokens[i]]) + 1);
        ranks[i] = 1 + (int32_t)number_from(row, count, next);
    }
    return DONE;
}

INLINE vf surprise(vf p) { return -p * logarithm(larger(fill(FLT_MIN), p)); }

/* Insert p[i] into the descending values[size] of tokens[size]. */
INLINE void insert_probability(const float *p, int64_t i, int64_t size, int32_t *tokens, float *values) {
    int64_t k = size;
    for (; k && p[i] > values[k - 1]; k--)
        if (k < size) values[k] = values[k - 1], tokens[k] = tokens[k - 1];
    if (k < size) values[k] = p[i], tokens[k] = (int32_t)i;
}

/* Per row: its entropy in nats, and the `size` largest probabilities above 0 with their tokens, otherwise -1. */
void summarize(const float *probs, int64_t rows, int64_t stride, int64_t count, int64_t size, int32_t *tokens,
               float *values, double *entropies) {
    for (int64_t r = 0; r < rows; r++, tokens += size, values += size) {
        const float *p = probs + r * stride;
        double sum = 0;
        for (int64_t k = 0; k < size; k++) tokens[k] = -1, values[k] = 0;
        for (int64_t i = 0; i < count;) {
            int64_t end = i + PART <= count ? i + PART : count;
            float peak = end - i == PART ? largest_of_part(p + i) : INFINITY;
            if (end - i == PART && peak > 0) {
                vf part = {0};
                for (int j = 0; j < PART; j += LANES) part += surprise(load(p + i + j));
                sum += total(part);
            }
            if (peak <= values[size - 1]) i = end;
            for (; i < end; i++) {
                if (peak == INFINITY) sum += surprise(fill(p[i]))[0];
                insert_probability(p, i, size, tokens, values);
            }
        }
        entropies[r] = sum;
    }
}

/* Sum of max(weight p - q, 0) */
double excess(const float *p, const float *q, float weight, int64_t count) {
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

/* Divide `o` by its sum, which is returned; undefined numbers if it is 0 */
static double divide_by_sum(float *o, int64_t count) {
    double sum = mass_of(o, count);
    float factor = (float)(1 / sum);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(o + i, load(o + i) * factor);
    for (; i < count; i++) o[i] *= factor;
    return sum;
}

/* o = max(weight p - q, 0), normalised; returns its sum before. */
double residual(const float *p, const float *q, float weight, int64_t count, float *o) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(o + i, larger(weight * load(p + i) - load(q + i), fill(0)));
    for (; i < count; i++) o[i] = weight * p[i] > q[i] ? weight * p[i] - q[i] : 0;
    return divide_by_sum(o, count);
}

/* o = max(p - q / weight, 0), normalised, with q[size] of the tokens ids[size]; returns its sum before, -1 for an id
 * outside the vocabulary. */
double sparse_residual(const float *p, const int64_t *ids, const float *q, int64_t size, float weight, int64_t count,
                       float *o) {
    memcpy(o, p, (size_t)count * sizeof *o);
    for (int64_t k = 0; k < size; k++) {
        if ((uint64_t)ids[k] >= (uint64_t)count) return -1;
        float rest = p[ids[k]] - q[k] / weight;
        if (q[k] > 0) o[ids[k]] = rest > 0 ? rest : 0;
    }
    return divide_by_sum(o, count);
}
