/* Layout of the structures, compared with interface.py when the library is loaded */
#include "interface.h"
#include <stddef.h>

#define STRUCTURE(S) {#S, 0, sizeof(S)}
#define FIELD(S, F) {#S "." #F, offsetof(S, F), sizeof(((S *)0)->F)}

static const member members[] = {
    STRUCTURE(matrix), FIELD(matrix, weights), FIELD(matrix, scales), FIELD(matrix, sums), FIELD(matrix, codes),
    FIELD(matrix, code_bytes), FIELD(matrix, bias), FIELD(matrix, form), FIELD(matrix, outputs),
    FIELD(matrix, inputs),
    STRUCTURE(layer), FIELD(layer, qkv), FIELD(layer, value), FIELD(layer, out), FIELD(layer, gate_up),
    FIELD(layer, down), FIELD(layer, enter), FIELD(layer, between), FIELD(layer, query_norm), FIELD(layer, key_norm),
    FIELD(layer, after_out), FIELD(layer, after_down), FIELD(layer, attention_scale), FIELD(layer, window),
    STRUCTURE(model), FIELD(model, layers), FIELD(model, embedding), FIELD(model, positions),
    FIELD(model, channel_scale), FIELD(model, leave), FIELD(model, head), FIELD(model, layer_count),
    FIELD(model, width), FIELD(model, inner), FIELD(model, heads), FIELD(model, kv_heads), FIELD(model, head_dim),
    FIELD(model, cache_form), FIELD(model, rotated), FIELD(model, activation), FIELD(model, gated),
    FIELD(model, centred), FIELD(model, parallel), FIELD(model, epsilon), FIELD(model, embedding_scale),
    FIELD(model, attention_cap), FIELD(model, logit_cap),
    STRUCTURE(pass), FIELD(pass, model), FIELD(pass, cache), FIELD(pass, cosines), FIELD(pass, sines),
    FIELD(pass, ids), FIELD(pass, positions), FIELD(pass, prefix), FIELD(pass, extra), FIELD(pass, extra_start),
    FIELD(pass, taps), FIELD(pass, hidden), FIELD(pass, logits), FIELD(pass, scratch), FIELD(pass, capacity),
    FIELD(pass, rows), FIELD(pass, last), FIELD(pass, held), FIELD(pass, threads),
    STRUCTURE(chain), FIELD(chain, top_p), FIELD(chain, uniforms), FIELD(chain, probs), FIELD(chain, scratch),
    FIELD(chain, peaks), FIELD(chain, chosen), FIELD(chain, tokens), FIELD(chain, top_k), FIELD(chain, vocab),
    FIELD(chain, temperature), FIELD(chain, count),
    STRUCTURE(format), FIELD(format, name), FIELD(format, bits), FIELD(format, group), FIELD(format, scales),
    FIELD(format, scale_form), FIELD(format, activation_peak), FIELD(format, step), FIELD(format, offset),
    {0, 0, 0},
};

/* Members up to one without name */
const member *interface_members(void) { return members; }
