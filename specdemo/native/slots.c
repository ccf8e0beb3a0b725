/* Markov term and confidence of the slots of a block head */
#include "products.h"

/* Add the outputs of a matrix to o. */
static void add_product(const matrix *m, const float *x, float *o) {
    float part[UNIT];
    for (int64_t first = 0, left; (left = block_count(m) - first) > 0; first += UNIT_BLOCKS) {
        float_product(m, first, left < UNIT_BLOCKS ? (int)left : UNIT_BLOCKS, x, m->inputs, 1, part);
        int64_t end = m->outputs - first * BLOCK, count = end < UNIT ? end : UNIT;
        for (int64_t i = 0; i < count; i++) o[first * BLOCK + i] += part[i];
    }
}

static float dot(const float *a, const float *b, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* Add the token before a slot to its logits. Returns the confidence that its token is accepted, which depends on that
 * token and on `state`, the state of the slot after the final norm. embedded[width] is scratch. */
float follow_token(const model *m, const float *state, int32_t token, float *embedded, float *logits) {
    const block_slots *b = m->slots;
    int32_t rank = b->narrow.outputs;
    float narrow[MOST_RANK] = {0};
    read_row(m->embedding, token, embedded);
    add_product(&b->narrow, embedded, narrow);
    add_product(&b->wide, narrow, logits);
    const float *weights = b->confidence;
    float sum = dot(weights, state, m->width) + dot(weights + m->width, narrow, rank) + weights[m->width + rank];
    return 1.0f / (1.0f + expf(-sum));
}
