/* Units of attention: groups of rows and key heads, or sections of these */
#include "state.h"

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
    return floats_of_results(group_rows(m) * (m->heads / m->kv_heads), padded_dim(m));
}

/* Numbers in the buffer of a thread */
int64_t attention_floats(const model *m) {
    int64_t heads = m->heads / m->kv_heads, queries = group_rows(m) * heads, padded = padded_dim(m);
    return queries * (SPAN + LANES) + whole_vectors(queries) + 2 * SPAN * padded + heads * SPAN + 2 * result_floats(m);
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
    g.q = s->query + (kv * s->p->rows + in.first) * g.heads * g.padded;
    g.scores = buffer, buffer += g.queries * SPAN;
    g.sums = buffer, buffer += g.queries * LANES;
    g.factors = buffer, buffer += whole_vectors(g.queries);
    g.key_tile = buffer, buffer += SPAN * g.padded;
    g.value_tile = buffer, buffer += SPAN * g.padded;
    g.far_scores = buffer;
    return g;
}

/* The positions from `begin` on are needed next. */
static void set_after(group *g, int64_t begin, const char *keys, const char *values, int form) {
    int64_t at = begin * g->padded * number_bytes(form);
    g->after[0] = keys + at, g->after[1] = values + at;
}

static void write_outputs(state *s, const group *g, row_group in, int64_t kv, float *totals) {
    const model *m = s->p->model;
    for (int64_t i = 0; i < g->queries; i++) {
        int64_t r = in.first + i / g->heads, h = kv * g->heads + i % g->heads, d = 0;
        const float *x = totals + i * g->padded;
        float *o = s->input + r * input_width(m) + h * g->dim, scale = 1.0f / weight_sums(g, totals)[i];
        for (; d + LANES <= g->dim; d += LANES) store(o + d, load(x + d) * scale);
        for (; d < g->dim; d++) o[d] = x[d] * scale;
    }
}

/* Few groups are divided into sections, which different threads may compute. */
static int is_divided(const pass *p) {
    return p->threads > 1 && group_count(p) * p->model->kv_heads < 4 * (int64_t)p->threads;
}

static int64_t unit_count(const pass *p) {
    int64_t units = 0;
    if (!is_divided(p)) return group_count(p) * p->model->kv_heads;
    for (int64_t i = 0; i < group_count(p); i++) units += section_count(rows_of(p, i).longest) * p->model->kv_heads;
    return units;
}

/* Sections of a group and key head. The units from `first` on compute them, the largest first. */
typedef struct sections {
    row_group in;
    int64_t kv, first, count;
    int32_t computed;
} sections;

/* Numbers of the results and descriptions of all sections */
int64_t section_floats(const pass *p) {
    int64_t described = group_count(p) * p->model->kv_heads * (int64_t)sizeof(sections) / (int64_t)sizeof(float);
    return is_divided(p) ? unit_count(p) * result_floats(p->model) + described : 0;
}

/* Describe the units of attention; `results` has section_floats() numbers. */
void divide_attention(state *s, float *results) {
    const pass *p = s->p;
    s->attention_units = unit_count(p), s->results = results, s->sections = 0;
    if (!is_divided(p)) return;
    sections *next = s->sections = (sections *)(results + s->attention_units * result_floats(p->model));
    for (int64_t i = 0, first = 0; i < group_count(p); i++)
        for (int64_t kv = 0; kv < p->model->kv_heads; kv++, first += next++->count) {
            row_group in = rows_of(p, i);
            *next = (sections){in, kv, first, section_count(in.longest), 0};
        }
}

static void finish(state *s, int l, const group *g, row_group in, int64_t kv, float *totals) {
    const model *m = s->p->model;
    write_outputs(s, g, in, kv, totals);
    int64_t count = g->heads * g->dim;
    if (has_parts(&m->layers[l]->out, count))
        quantise_part(s, &m->layers[l]->out, kv * count, (kv + 1) * count, s->input, input_width(m),
                      (row_range){in.first, in.rows});
}

static void attend_group(state *s, int l, row_group in, int64_t kv, float *buffer) {
    const model *m = s->p->model;
    visible rows[GROUP_QUERIES];
    float *totals = buffer + attention_floats(m) - result_floats(m);
    group g = prepare(s, l, in, kv, rows, buffer);
    clear_results(&g, totals);
    for (int64_t begin = 0, end; begin < in.longest; begin = end) {
        end = section_end(begin);
        if (end < in.longest)
            set_after(&g, end, g.keys, g.values, m->cache_form);
        else
            g.after[0] = g.after[1] = 0;
        attend_section(m->cache_form, &g, begin, end < in.longest ? end : in.longest);
        add_section(&g, begin, end, totals);
    }
    finish(s, l, &g, in, kv, totals);
}

static int64_t section_begin(int64_t section) {
    int64_t begin = 0;
    while (section--) begin = section_end(begin);
    return begin;
}

/* Begin of the section that a unit computes */
static int64_t unit_begin(const sections *of, int64_t unit) { return section_begin(of->first + of->count - 1 - unit); }

/* Add the sections of a group and key head in ascending order. */
static void add_sections(state *s, int l, group *g, const sections *of, float *totals) {
    clear_results(g, totals);
    for (int64_t section = 0, begin = 0; section < of->count; section++, begin = section_end(begin)) {
        g->o = s->results + (of->first + of->count - 1 - section) * result_floats(s->p->model);
        add_section(g, begin, section_end(begin), totals);
    }
    finish(s, l, g, of->in, of->kv, totals);
}

/* Compute a unit. The thread that computes the last section of a group and key head adds them. */
void attend(state *s, int l, int64_t unit, float *buffer) {
    const pass *p = s->p;
    const model *m = p->model;
    if (!s->sections) {
        attend_group(s, l, rows_of(p, unit % group_count(p)), unit / group_count(p), buffer);
        return;
    }
    visible rows[GROUP_QUERIES];
    sections *of = s->sections, *next;
    while (unit >= of->first + of->count) of++;
    group g = prepare(s, l, of->in, of->kv, rows, buffer);
    int64_t begin = unit_begin(of, unit), end = section_end(begin);
    if (unit + 1 < s->attention_units) {
        next = unit + 1 < of->first + of->count ? of : of + 1;
        set_after(&g, unit_begin(next, unit + 1), cached_head(next->in.of, m, l, next->kv),
                  cached_head(next->in.of, m, l, m->kv_heads + next->kv), m->cache_form);
    }
    g.o = s->results + unit * result_floats(m);
    attend_section(m->cache_form, &g, begin, end < of->in.longest ? end : of->in.longest);
    if (__atomic_add_fetch(&of->computed, 1, __ATOMIC_ACQ_REL) < of->count) return;
    of->computed = 0;
    add_sections(s, l, &g, of, buffer + attention_floats(m) - result_floats(m));
}
