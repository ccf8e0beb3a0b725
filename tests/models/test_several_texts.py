"""Several texts in a single pass of the native engine: rows have the same bits as alone."""

import random

import pytest
import torch
from fakes.native_models import CONFIGS, FAMILIES, QUANTIZED, text, weights
from fakes.passes import Passes

from specdemo.core.step import Draft
from specdemo.models.engines.engine import Entry
from specdemo.models.engines.native import NATIVE_CHUNK
from specdemo.models.engines.select import engine_of
from specdemo.models.threads import torch_threads
from specdemo.native.formats import QUANTISED_GGUF

FORMS = [
    *((name, "float32") for name in ("llama", *FAMILIES)),
    ("odd widths", "bfloat16"),
    *(("llama", form) for form in (*QUANTIZED, *QUANTISED_GGUF)),
]


def random_draft(rng: random.Random) -> Draft:
    count = rng.randrange(5)
    tokens = tuple(rng.randrange(20) for _ in range(count))
    if rng.random() < 0.5:
        return Draft.chain(tokens)
    return Draft(tokens, tuple(rng.randrange(-1, i) if i else -1 for i in range(count)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_rows_have_the_bits_of_passes_with_one_text(name: str, form: str, threads: int) -> None:
    """Random lengths, drafts and numbers of texts; hidden states and caches as well."""
    rng, engine = random.Random(name + form), engine_of(weights(name, form))
    taps = (0, 1) if name in CONFIGS else ()
    with torch_threads(threads):
        shared, alone = ([Passes(engine, taps) for _ in range(6)] for _ in range(2))
        lengths = [0] * 6
        for _ in range(4):
            chosen = rng.sample(range(6), rng.randrange(1, 7))
            drafts = [random_draft(rng) for _ in chosen]
            new = [text(rng.randrange(1, 30), seed=rng.randrange(99)) for _ in chosen]
            together = engine.run(
                [
                    Entry(shared[i].cache, [*tokens, *draft.tokens], lengths[i], draft)
                    for i, tokens, draft in zip(chosen, new, drafts, strict=True)
                ]
            )
            for logits, i, tokens, draft in zip(together, chosen, new, drafts, strict=True):
                expected = alone[i].run([*tokens, *draft.tokens], lengths[i], draft)
                assert torch.equal(logits, expected) and len(logits) == len(draft) + 1
                lengths[i] += len(tokens)
                slots = [lengths[i] + node for node in draft.path(len(draft) - 1)] if len(draft) else []
                shared[i].keep(lengths[i], slots), alone[i].keep(lengths[i], slots)
                lengths[i] += len(slots)
        for one, other, length in zip(shared, alone, lengths, strict=True):
            assert one.cache.length == other.cache.length == length
            assert torch.equal(one.cache.states[:length], other.cache.states[:length])


def test_prompts_longer_than_a_chunk_share_passes_with_other_texts() -> None:
    engine = engine_of(weights("llama", "float32"))
    prompts = [text(count, seed=count) for count in (3, NATIVE_CHUNK + 40, 250, 30, 2 * NATIVE_CHUNK)]
    together = engine.run([Entry(engine.open(), prompt, 0, Draft()) for prompt in prompts])
    for logits, prompt in zip(together, prompts, strict=True):
        assert torch.equal(logits, Passes(engine).run(prompt, 0, Draft()))
