"""Encoder-decoders: greedy text equals that of transformers; speculative decoding is exact."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tiny_models import (
    CONTEXT,
    ENCODERS,
    Explorer,
    blurred,
    byte_level_tokenizer,
    committed,
    from_config,
    letters_tokenizer,
    run,
    save_model,
    sharp_model,
    tiny_model,
)
from fakes.traces import trace_lines as generate
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import BartConfig, PreTrainedModel, PreTrainedTokenizerFast, T5Config

from specdemo.cli import main
from specdemo.core.decode import Drafter, EmptyDrafter
from specdemo.core.errors import UserError
from specdemo.core.policies import Fixed
from specdemo.core.rules import match, rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Step
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ModelDrafter
from specdemo.drafters.ngram import NGramDrafter
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.models.engines.generic import opening
from specdemo.models.kv_cache import CachedModel
from specdemo.models.memory_plan import plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.preflight import preflight
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe, plan_run

pytestmark = pytest.mark.slow

GREEDY, NOISE, VOCAB = SamplingParams(temperature=0), Noise(0, "unused when greedy"), 61


def generated(model: PreTrainedModel, source: list[int], length: int) -> list[int]:
    """Oracle: greedy search of transformers."""
    ids = torch.tensor([source])
    start = opening(model)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=length + len(start) - 1,
        pad_token_id=0,
        decoder_start_token_id=start[0],
    )
    return out[0, len(start) :].tolist()


def sources(kind: str, count: int) -> Iterator[tuple[list[int], int]]:
    """Yield sources and output lengths: a single token, the maximum, and lengths between."""
    rng = random.Random(kind)
    for size, length in ((1, 12), (CONTEXT, 8), (12, 16), (5, 1), (20, 12))[:count]:
        yield [rng.randrange(3, VOCAB) for _ in range(size)], length


@pytest.mark.parametrize("kind", ENCODERS)
def test_greedy_text_is_that_of_transformers(kind: str) -> None:
    """AR and speculative; the drafter encodes the same source."""
    model = tiny_model(kind)
    small = blurred(model, kind)
    start = opening(model)
    texts, drafted, accepted = set(), 0, 0

    def decoded(drafter: Drafter, gamma: int) -> list[Step]:
        score = CachedModel(model, source=source).score
        verifier = ModelVerifier(score, GREEDY, rejection, NOISE, NOISE, candidates=3)
        return run(start, verifier, drafter, Fixed(gamma), length)

    thorough = kind in ("t5", "bart")  # the others run through the same lines of ours
    for number, (source, length) in enumerate(sources(kind, 5 if thorough else 3)):
        expected = generated(model, source, length)
        texts.add(tuple(expected[:8]))
        assert committed(decoded(EmptyDrafter(), 1)) == expected
        gamma = (4, 3, 1)[number % 3]
        cache = CachedModel(small, source=source)
        for drafter in (
            ModelDrafter(cache.score, GREEDY, NOISE, VOCAB, extend=cache.extend),
            NGramDrafter(4, "multi", 3, source=source),
        ):
            steps = decoded(drafter, gamma)
            assert committed(steps) == expected, (gamma, source)
            drafted += sum(len(step.draft) for step in steps)
            accepted += sum(len(step.verdict.accepted) for step in steps)
    assert drafted > accepted > 0 and len(texts) > 1  # the source matters


def test_encoder_runs_once_and_the_decoder_is_fed_new_tokens() -> None:
    model = tiny_model("t5")
    cached = CachedModel(model, source=[9, 8, 7, 6, 5])  # checks the model
    rows: dict[str, list[int]] = {"encoder": [], "decoder": []}
    for name in rows:
        getattr(model, name).register_forward_pre_hook(
            lambda module, args, kwargs, name=name: rows[name].append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
    cached.score([0, 2, 3], Draft())
    held = cached.kv_bytes
    cached.score([0, 2, 3, 4], Draft.chain((5, 6)))
    cached.score([0, 2, 3, 4, 5, 6, 7], Draft())
    cached.score([0, 2, 3, 4, 5, 8], Draft())
    cached.score([0, 9], Draft())  # different text for the same source
    assert rows == {"encoder": [5], "decoder": [3, 3, 1, 1, 1]}
    assert cached.kv_bytes == held - 2 * 2 * 4 * 8 * 4  # a position less: 2 layers, keys and values, 4 heads of 8


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_closed_cache_contains_nothing_of_the_source(kind: str) -> None:
    cached = CachedModel(tiny_model(kind), source=[9, 8, 7, 6, 5])
    cached.score([0, 2, 3], Draft())
    cache: Any = cached._cache
    states = [cache.encoded[0], *(x for layer in cache.crossed.layers for x in (layer.keys, layer.values))]
    assert all(x.any() for x in states)
    assert cached.reserved_bytes > sum(x.nbytes for x in states)
    cached.close()
    assert not any(x.any() for x in states)


@pytest.mark.parametrize("rule", [rejection, match])
@pytest.mark.parametrize("name", ["model", "n-grams", "suffix"])
def test_distribution_equals_the_target(name: str, rule: Any) -> None:
    """Enumeration over texts of three tokens: every draw is explored."""
    sizes = {"vocab_size": 4, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    torch.manual_seed(3)
    model, small = from_config(config).eval(), from_config(config).eval()
    source, sampling = [2, 1, 2, 1, 3], SamplingParams(temperature=4.0)
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def remembered(cached: CachedModel, which: int) -> Any:
        """Cache rows by their inputs, which the enumeration repeats."""

        def score(tokens: list[int], draft: Draft) -> torch.Tensor:
            key = (which, len(tokens), *tokens, *draft.tokens)
            if key not in known:
                known[key] = cached.score(tokens, draft).clone()
            return known[key]

        return score

    judged = remembered(CachedModel(model, source=source), 0)
    drafts = remembered(CachedModel(small, source=source), 1)
    explorer, accepted = Explorer(), 0

    def once() -> tuple[int, ...]:
        nonlocal accepted
        drafter: Any = {
            "model": lambda: ModelDrafter(drafts, sampling, explorer, 4),
            "n-grams": lambda: NGramDrafter(3, "multi", 2, source=source),
            "suffix": lambda: SuffixDrafter(source=source),
        }[name]()
        steps = run([0], ModelVerifier(judged, sampling, rule, explorer, explorer, 2), drafter, Fixed(2), 3)
        accepted += sum(len(step.verdict.accepted) for step in steps)
        return tuple(committed(steps))

    probs = explorer.distribution(once)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    ids = torch.tensor([source])
    for _ in range(3):
        longer = {}
        for text, weight in expected.items():
            logits = model(input_ids=ids, decoder_input_ids=torch.tensor([[0, *text]])).logits[0, -1]
            for token, x in enumerate((logits / sampling.temperature).softmax(-1).tolist()):
                longer[(*text, token)] = weight * x
        expected = longer
    assert accepted > 0 and max(expected.values()) < 0.9
    assert sum(abs(probs.get(text, 0.0) - x) for text, x in expected.items()) / 2 < 1e-5
    assert math.isclose(sum(probs.values()), 1, abs_tol=1e-5)


# --- checkpoints -------------------------------------------------------------------------------------------------


LETTERS = [chr(i) for i in range(32, 127)]


def reading_tokenizer() -> PreTrainedTokenizerFast:
    """Like T5, append a special token to the source."""
    tokenizer = byte_level_tokenizer()
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    return tokenizer


def save_encoder(folder: Path, config: Any, seed: int = 0, tokenizer: Any = None) -> str:
    model = sharp_model(config, seed)
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)
    (tokenizer or reading_tokenizer()).save_pretrained(folder)
    return str(folder)


def with_a_head(folder: Path) -> str:
    """Store an untied head and declare it in config.json, like T5 1.1 and Flan-T5."""
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    weights["lm_head.weight"] = torch.randn_like(weights["shared.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    del config["scale_decoder_outputs"]  # added by this transformers version
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 4, "pad_token_id": 1}
    t5 = {**sizes, "decoder_start_token_id": 1, "eos_token_id": 0}
    letters = T5Config(**{**t5, "vocab_size": len(LETTERS)}, num_layers=1)
    stacks = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    bart = {"vocab_size": 300, "d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 1}
    places = {"max_position_embeddings": 80, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 2}
    return {
        "t5": save_encoder(root / "t5", T5Config(**t5, num_layers=2)),
        "apart": with_a_head(Path(save_encoder(root / "apart", T5Config(**t5, num_layers=2), seed=3))),
        "small": save_encoder(root / "small", T5Config(**t5, num_layers=1), seed=1),
        "stranger": save_encoder(root / "stranger", letters, 1, letters_tokenizer(LETTERS)),
        "gated": save_encoder(root / "gated", T5Config(**t5, num_layers=2, feed_forward_proj="gated-gelu"), seed=2),
        "bart": save_encoder(root / "bart", BartConfig(**bart, **stacks, **places, tie_word_embeddings=False)),
        "decoder": str(save_model(root / "decoder", byte_level_tokenizer())),
    }


POOL = ModelPool()  # each checkpoint is loaded once
TOKENS = 14
PROMPT = "for i in range(10):\n    print(i, 'naïve café', '東京', '🙂🙃')\n"


def lines(recipe: Recipe, prompt: str = PROMPT) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    head, *steps, end = (line for line in generate(recipe, prompt, POOL) if "phase" not in line)
    return head, steps, end


def tokens_of(steps: list[dict[str, Any]]) -> list[int]:
    return [token for step in steps for token in step["tokens"]]


@pytest.mark.parametrize("name", ["t5", pytest.param("gated", marks=pytest.mark.exhaustive), "bart"])
def test_checkpoints_run_and_their_pieces_join_up(models: dict[str, str], name: str) -> None:
    base = Recipe(target=models[name], drafter=models[name], temperature=0, max_tokens=TOKENS, device="cpu")
    head, plain, end = lines(replace(base, method="ar"))
    loaded = POOL.get(plan_run(base).target)
    assert head["encoder"] and head["prompt_tokens"] == loaded.tokenizer.encode(PROMPT)
    assert head["prompt_tokens"][-1] == loaded.tokenizer.eos_token_id
    assert end["metrics"]["kv_bytes"] > 0 and len(tokens_of(plain)) > 4
    assert tokens_of(plain) == generated(loaded.model, head["prompt_tokens"], TOKENS)
    for method, gamma in (("draft", 1), ("draft", 4), ("nasd", 4), ("suffix", 4), ("lookup", 2), ("hybrid", 2)):
        _, steps, end = lines(replace(base, method=method, gamma=gamma))
        assert tokens_of(steps) == tokens_of(plain), (method, gamma)
        assert method != "draft" or end["metrics"]["accepted"] > 0
        whole = loaded.tokenizer.decode(tokens_of(steps), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(step["text"] for step in steps) == whole
    warm = replace(base, temperature=0.9, rule="coupled")
    assert tokens_of(lines(warm)[1]) == tokens_of(lines(replace(warm, method="ar"))[1])


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("t5", "int8"),
        pytest.param("t5", "fp16", marks=pytest.mark.exhaustive),
        ("apart", "nf4"),
        pytest.param("apart", "bf16", marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_checkpoints_run_and_match_the_memory_plan(
    models: dict[str, str], name: str, quantization: str
) -> None:
    """T5 excludes a layer from quantization; newer variants have an untied head."""
    base = Recipe(
        target=models[name],
        drafter=models["small"],
        quantization=quantization,
        drafter_quantization=quantization,
        temperature=0,
        max_tokens=TOKENS,
        device="cpu",
    )
    spec = plan_run(base).target.resolved()
    planned, loaded = plan_spec(spec, 256), POOL.get(spec)
    assert planned.weights == pytest.approx(loaded.weight_bytes, rel=0.15)
    kept = [module.weight for path, module in loaded.model.named_modules() if path.endswith(".wo")]
    assert kept and all(weight is None or weight.dtype in (torch.float32, torch.bfloat16) for weight in kept)
    cached = CachedModel(loaded.model, source=[3] * 128)
    cached.score([1] * 128, Draft())
    assert cached.kv_bytes <= planned.kv <= 2.1 * cached.kv_bytes
    head, plain, _ = lines(replace(base, method="ar"))
    assert tokens_of(plain) == generated(loaded.model, head["prompt_tokens"], TOKENS)
    _, steps, end = lines(base)
    assert tokens_of(steps) == tokens_of(plain) and end["metrics"]["drafted"] > 0


def test_another_model_drafts(models: dict[str, str]) -> None:
    base = Recipe(target=models["t5"], drafter=models["small"], temperature=0, max_tokens=24, device="cpu")
    assert tokens_of(lines(base)[1]) == tokens_of(lines(replace(base, method="ar"))[1])
    assert lines(replace(base, temperature=1.0))[2]["metrics"]["drafted"] > 0
    stranger = replace(base, drafter=models["stranger"], universal=True)
    _, steps, end = lines(stranger, "some letters")
    assert tokens_of(steps) == tokens_of(lines(replace(base, method="ar"), "some letters")[1])
    assert end["metrics"]["drafted"] > 0


def test_the_terminal_shows_the_prompt_apart(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run_it = ["run", PROMPT, "--target", models["t5"], "--method", "ar", "--max-tokens", "4", "--device", "cpu"]
    assert main(run_it) == 0
    assert capsys.readouterr().out.startswith(PROMPT + "\n")
    assert main([*run_it, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["encoder"]


def test_the_speed_up_is_predicted(models: dict[str, str]) -> None:
    recipe = Recipe(target=models["t5"], drafter=models["t5"], max_tokens=8, temperature=0.0, device="cpu")
    assert len(preflight(recipe, [Prompt("text", "one", PROMPT)], ModelPool()).estimates) == 8


def test_models_that_do_not_fit_raise(models: dict[str, str], tmp_path: Path) -> None:
    base = Recipe(target=models["t5"], drafter=models["t5"], device="cpu")
    for method in ("tree", "lookahead", "beam", "self"):
        with pytest.raises(UserError, match=f"the target has an encoder.* method {method} .*choose .*draft"):
            lines(replace(base, method=method))
    for target, drafter, role in (("t5", "decoder", "target"), ("decoder", "t5", "drafter")):
        with pytest.raises(UserError, match=f"the {role} has an encoder"):
            lines(replace(base, target=models[target], drafter=models[drafter]))
    with pytest.raises(UserError, match="the encoder reads 80: shorten it by at least"):
        lines(Recipe(target=models["bart"], method="ar", device="cpu"), "x = 1\n" * 60)
    with pytest.raises(UserError, match="chains only"):
        CachedModel(tiny_model("t5"), source=[3]).score([0], Draft((1, 2), (-1, -1)))
    lost = tiny_model("bart")
    lost.generation_config.decoder_start_token_id = lost.generation_config.bos_token_id = None
    with pytest.raises(UserError, match="which token its decoder starts from"):
        opening(lost)
