/* Units of attention: groups of rows and key heads, or sections of these */
#include "attention.h"

#define FIRST_SECTION 64 /* positions; later sections have an eighth to a quarter of the positions before them */

static int64_t section_end(int64_t begin) {
    int64_t size = FIRST_SECTION;
    while (8 * size <= begin) size *= 2;
    return begin + size;
}
static int64_t section_count(int64_t positions) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < positions; begin = section_end(begin)) count++;
    return count;
}

static visible visible_to(const pass *p, int l, int64_t r) {
    visible row = {p->extra + p->extra_start[r], p->prefix[r], p->prefix[r], 0};
    row.count += p->extra_start[r + 1] - p->extra_start[r];
    int64_t window = p->model->layers[l]->window;
    if (window && row.count > window) row.skipped = row.count - window;
    return row;
}

/* Rows of a text that read keys and values together */
typedef struct {
    const text *of;
    int64_t first, rows, longest; /* longest: positions that the row sees that sees most */
} row_group;

static int64_t group_rows(const model *m) { return larger_of(1, GROUP_QUERIES / (m->heads / m->kv_heads)); }
static int64_t groups_of(const model *m, const text *t) { return (t->rows + group_rows(m) - 1) / group_rows(m); }
static int64_t group_count(const pass *p) {
    int64_t count = 0;
    for (int t = 0; t < p->text_count; t++) count += groups_of(p->model, p->texts + t);
    return count;
}
static row_group rows_of(const pass *p, int64_t i) {
    const text *t = p->texts;
    int64_t before = 0, count;
    while (i >= (count = groups_of(p->model, t))) i -= count, before += t++->rows;
    int64_t first = before + t->rows * i / count, end = before + t->rows * (i + 1) / count;
    row_group in = {t, first, end - first, 0};
    for (int64_t r = first; r < end; r++)
        in.longest = larger_of(in.longest, (int64_t)p->prefix[r] + p->extra_start[r + 1] - p->extra_start[r]);
    return in;
}

/* Numbers of the results of a group */
static int64_t result_floats(const model *m) {
    return group_rows(m) * (m->heads / m->kv_heads) * (padded_dim(m) + NUMBERS);
}

/* Numbers in the buffer of a thread */
int64_t attention_floats(const model *m) {
    int64_t heads = m->heads / m->kv_heads, queries = group_rows(m) * heads, padded = padded_dim(m);
    return queries * (padded + SPAN + LANES) + 2 * SPAN * padded + heads * SPAN + 2 * result_floats(m);
}

/* Describe the rows and key head `kv`; `rows`: GROUP_QUERIES elements. */
static group describe(const state *s, int l, row_group in, int64_t kv, visible *rows) {
    const pass *p = s->p;
    const model *m = p->model;
    group g = {.rows = rows, .row_count = in.rows, .heads = m->heads / m->kv_heads, .dim = m->head_dim};
    g.keys = cached_head(in.of, m, l, kv), g.values = cached_head(in.of, m, l, m->kv_heads + kv);
    g.queries = in.rows * g.heads, g.padded = padded_dim(m), g.cap = m->attention_cap;
    for (int64_t r = 0; r < in.rows; r++) rows[r] = visible_to(p, l, in.first + r);
    return g;
}

static group prepare(const state *s, int l, row_group in, int64_t kv, visible *rows, float *buffer) {
    group g = describe(s, l, in, kv, rows);
    g.o = buffer, buffer += result_floats(s->p->model);
    g.q = buffer, buffer += g.queries * g.padded;
    g.scores = buffer, buffer += g.queries * SPAN;
    g.sums = buffer, buffer += g.queries * LANES;
    g.key_tile = buffer, buffer += SPAN * g.padded;
    g.value_tile = buffer, buffer += SPAN * g.padded;
    g.far_scores = buffer;
    for (int64_t r = 0; r < in.rows; r++)
        memcpy(g.q + r * g.heads * g.padded, s->query + ((in.first + r) * s->p->model->heads + kv * g.heads) * g.padded,
               g.heads * g.padded * sizeof *g.q);
    return g;
}

static void write_outputs(state *s, const group *g, row_group in, int64_t kv, const float *totals) {
    const model *m = s->p->model;
    for (int64_t i = 0; i < g->queries; i++) {
        int64_t r = in.first + i / g->heads, h = kv * g->heads + i % g->heads, d = 0;
        const float *x = totals + i * (g->padded + NUMBERS);
        float *o = s->input + r * input_width(m) + h * g->dim, scale = 1.0f / x[g->padded];
        for (; d + LANES <= g->dim; d += LANES) store(o + d, load(x + d) * scale);
        for (; d < g->dim; d++) o[d] = x[d] * scale;
    }
}

/* Few groups are divided into sections, which different threads may compute. */
static int is_divided(const pass *p) {
    return p->threads > 1 && group_count(p) * p->model->kv_heads < 4 * (int64_t)p->threads;
}

int64_t attention_units(const pass *p) {
    int64_t units = 0;
    if (!is_divided(p)) return group_count(p) * p->model->kv_heads;
    for (int64_t i = 0; i < group_count(p); i++) units += section_count(rows_of(p, i).longest) * p->model->kv_heads;
    return units;
}

/* Numbers of the results of all sections, and of one more, if groups are divided */
int64_t section_floats(const pass *p) { return is_divided(p) ? (attention_units(p) + 1) * result_floats(p->model) : 0; }

static void attend_group(state *s, int l, row_group in, int64_t kv, float *buffer) {
    const model *m = s->p->model;
    visible rows[GROUP_QUERIES];
    float *totals = buffer + attention_floats(m) - result_floats(m);
    group g = prepare(s, l, in, kv, rows, buffer);
    clear_results(&g, totals);
    for (int64_t begin = 0, end; begin < in.longest; begin = end) {
        end = section_end(begin);
        attend_section(m->cache_form, &g, begin, end < in.longest ? end : in.longest);
        add_section(&g, begin, end, totals);
    }
    write_outputs(s, &g, in, kv, totals);
}

/* Compute a unit. */
void attend(state *s, int l, int64_t unit, float *buffer) {
    const pass *p = s->p;
    const model *m = p->model;
    int64_t i = 0, left = unit, begin = 0, end;
    if (!is_divided(p)) {
        attend_group(s, l, rows_of(p, unit % group_count(p)), unit / group_count(p), buffer);
        return;
    }
    row_group in = rows_of(p, 0);
    int64_t sections = section_count(in.longest);
    while (left >= sections * m->kv_heads) {
        left -= sections * m->kv_heads;
        in = rows_of(p, ++i), sections = section_count(in.longest);
    }
    visible rows[GROUP_QUERIES];
    group g = prepare(s, l, in, left % m->kv_heads, rows, buffer);
    for (int64_t after = left / m->kv_heads; after < sections - 1; after++)
        begin = section_end(begin); /* largest first */
    end = section_end(begin);
    g.o = s->sections + unit * result_floats(m);
    attend_section(m->cache_form, &g, begin, end < in.longest ? end : in.longest);
}

/* Add the sections of divided groups, after all units. */
void finish_attention(state *s, int l) {
    const pass *p = s->p;
    const model *m = p->model;
    if (!is_divided(p)) return;
    float *next = s->sections, *totals = s->sections + attention_units(p) * result_floats(m);
    for (int64_t i = 0; i < group_count(p); i++) {
        row_group in = rows_of(p, i);
        int64_t sections = section_count(in.longest);
        visible rows[GROUP_QUERIES];
        for (int64_t kv = 0; kv < m->kv_heads; kv++) {
            group g = describe(s, l, in, kv, rows);
            clear_results(&g, totals);
            for (int64_t section = 0, begin = 0; section < sections; section++, begin = section_end(begin)) {
                g.o = next + ((sections - 1 - section) * m->kv_heads + kv) * result_floats(m);
                add_section(&g, begin, section_end(begin), totals);
            }
            write_outputs(s, &g, in, kv, totals);
        }
        next += sections * m->kv_heads * result_floats(m);
    }
}
