"""Fake models: table models, exhaustive sampling, drafters with unusual shapes, tiny real models."""

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    T5GemmaConfig,
    T5GemmaModuleConfig,
)

from specdemo.core.decode import DraftBudget, Drafter, DraftLengthPolicy, Verifier, decode
from specdemo.core.distributions import DenseProbs, SparseProbs, SparseRow, without
from specdemo.core.policies import Fixed
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import HEAD, Draft, Step, Verdict


class TableModel:
    """Language model with random logits, seeded by the full prefix."""

    def __init__(self, vocab: int, seed: int, spread: float = 1.5) -> None:
        self.vocab, self.seed, self.spread = vocab, seed, spread
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, prefix: Sequence[int]) -> Tensor:
        prefix = tuple(prefix)
        if prefix not in self._known:
            rng = random.Random(f"{self.seed}/{prefix}")
            self._known[prefix] = torch.tensor([rng.gauss(0, self.spread) for _ in range(self.vocab)])
        return self._known[prefix]

    def score(self, tokens: Sequence[int], draft: Draft) -> Tensor:
        """Logits `[n + 1, vocab]`, each row computed from its path without a cache."""
        rows = [[*tokens, *(draft.tokens[i] for i in draft.path(node))] for node in range(-1, len(draft))]
        return torch.stack([self.logits(row) for row in rows])

    def extend(
        self, tokens: Sequence[int], count: int, pick: Callable[[Tensor, int], Tensor], limits: Sequence[float] = ()
    ) -> list[int] | None:
        """Tokens picked in sequence, like `CachedModel.extend`."""
        if any(limits):
            return None
        path = list(tokens)
        for i in range(count):
            path.append(int(pick(self.logits(path)[None], i)))
        return path[len(tokens) :]


class TableHead:
    """Head with the logits of a table model for the tokens `ids`; None: all."""

    confidence: float | None = None
    origin = HEAD

    def __init__(self, model: TableModel, ids: Sequence[int] | None, kind: str = "eagle") -> None:
        self.model, self.ids = model, None if ids is None else torch.tensor(ids)
        self.kind = kind
        self.expected = 0
        self._path: list[int] = []

    def longest_draft(self, tokens: Sequence[int]) -> int:
        return 99

    def expect(self) -> None:
        self.expected += 1

    def start(self, tokens: Sequence[int]) -> Tensor | None:
        self._path = list(tokens)
        return self._logits()

    def step(self, token: int) -> Tensor:
        self._path.append(token)
        return self._logits()

    def score_nodes(self, tokens: Sequence[int], draft: Draft, nodes: Sequence[int]) -> list[Tensor] | None:
        if self.start(tokens) is None:
            return None
        paths = [[*tokens, *(draft.tokens[i] for i in draft.path(node))] for node in nodes]
        return [self.start(path) for path in paths]

    def sample_chain(self, *arguments: Any) -> None:
        return None

    def _logits(self) -> Tensor:
        logits = self.model.logits(self._path)
        return logits if self.ids is None else logits[self.ids]


class Explorer:
    """Random source that takes every branch once, with its probability."""

    def __init__(self) -> None:
        self.script: list[int] = []
        self.depth = 0
        self.weight = 1.0
        self.open: list[tuple[int, ...]] = []
        self.drawn: list[tuple[int, Sequence[float]]] = []  # choices with their chances

    def choose(self, chances: Sequence[float]) -> int:
        if self.depth == len(self.script):
            possible = [i for i, chance in enumerate(chances) if chance > 0]
            self.open += [(*self.script, i) for i in possible[1:]]
            self.script.append(possible[0])
        pick = self.script[self.depth]
        self.depth += 1
        self.weight *= chances[pick]
        self.drawn.append((pick, chances))
        return pick

    def test(self, probability: float) -> tuple[bool, float]:
        return not self.choose((probability, 1 - probability)), probability

    def sample(self, probs: Tensor, position: int = 0) -> int:
        return self.choose(probs.tolist())

    def sample_sparse(self, row: SparseRow, position: int = 0) -> int:
        return int(row.ids[self.choose(row.values.tolist())])

    def sample_on_device(self, probs: Tensor, position: int = 0) -> Tensor:
        return torch.tensor([self.sample(probs)])

    def distribution(self, run: Callable[[], Any]) -> dict[Any, float]:
        """Exact distribution of the results of `run`."""
        outcomes: dict[Any, float] = {}
        self.open = [()]
        while self.open:
            self.script, self.depth, self.weight = list(self.open.pop()), 0, 1.0
            self.drawn = []
            outcome = run()
            outcomes[outcome] = outcomes.get(outcome, 0.0) + self.weight
        return outcomes


class EnumeratedVerifier:
    """Verifier without state, which decides once per text, draft and choices: every branch of a run repeats the others.

    Verdicts are kept by the choices within the call; incomplete choices have the chances of the next choice.
    """

    def __init__(self, verifier: Verifier, explorer: Explorer) -> None:
        self.verifier, self.explorer = verifier, explorer
        self._known: dict[Any, dict[tuple[int, ...], Verdict | Sequence[float]]] = {}

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        probs = None if draft.probs is None else str(draft.probs.dense().tolist())
        key = (tuple(tokens), draft.tokens, draft.parents, draft.token_probs, probs)
        known = self._known.setdefault(key, {})
        explorer = self.explorer
        before = (explorer.depth, explorer.weight)
        choices: tuple[int, ...] = ()
        while choices in known:
            next_or_verdict = known[choices]
            if isinstance(next_or_verdict, Verdict):
                return next_or_verdict
            choices += (explorer.choose(next_or_verdict),)
        explorer.depth, explorer.weight = before
        explorer.drawn = []
        verdict = self.verifier.verify(tokens, draft)
        choices = ()
        for pick, chances in explorer.drawn:
            known[choices] = chances
            choices += (pick,)
        known[choices] = verdict
        return verdict


class GuessDrafter:
    """Point masses: a few tokens guessed from the prefix; a forest if `width` is above 1."""

    def __init__(self, vocab: int, width: int = 1) -> None:
        self.vocab, self.width = vocab, width

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        drafted: list[int] = []
        parents: list[int] = []
        leaf = -1
        while budget.may_extend(len(drafted), None):
            first = (sum(tokens) + 2 * len(tokens) + len(drafted)) % self.vocab
            siblings = [(first + k) % self.vocab for k in range(self.width)]
            parents += [leaf] * len(siblings)
            drafted += siblings
            leaf = len(drafted) - 1
        return Draft(tuple(drafted), tuple(parents))

    def observe(self, step: Step) -> None: ...


class SiblingDrafter:
    """Two siblings drawn without replacement, each with a sampled child; probs as actually drawn from."""

    def __init__(self, model: TableModel, sampling: SamplingParams, source: Any) -> None:
        self.model, self.sampling, self.source = model, sampling, source

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        drafted: list[int] = []
        parents: list[int] = []
        distributions: list[Tensor] = []

        def add(parent: int, probs: Tensor) -> None:
            drafted.append(self.source.sample(probs))
            parents.append(parent)
            distributions.append(probs)

        first = self.sampling(self.model.logits(tokens)[None], [tokens])[0]
        add(-1, first)
        second = first.clone()
        second[drafted[0]] = 0
        if budget.may_extend(1, None) and second.sum() > 0:
            add(-1, second / second.sum())
        for parent in range(len(drafted)):
            if budget.may_extend(len(drafted), None):
                path = [*tokens, drafted[parent]]
                add(parent, self.sampling(self.model.logits(path)[None], [path])[0])
        q = tuple(float(probs[token]) for probs, token in zip(distributions, drafted, strict=True))
        return Draft(tuple(drafted), tuple(parents), q, DenseProbs(torch.stack(distributions)))

    def observe(self, step: Step) -> None: ...


class MixedDrafter:
    """Chain in which point masses, stored as one-hot rows, follow sampled tokens in turn."""

    def __init__(self, model: TableModel, sampling: SamplingParams, source: Any, first: int = 0) -> None:
        self.model, self.sampling, self.source, self.first = model, sampling, source, first

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        drafted: list[int] = []
        rows: list[Tensor] = []
        while budget.may_extend(len(drafted), logits := self.model.logits([*tokens, *drafted])):
            row = self.sampling(logits[None], [[*tokens, *drafted]])[0]
            if len(drafted) % 2 == self.first:
                row = torch.zeros_like(row).index_fill_(0, row.argmax(), 1.0)
            rows.append(row)
            drafted.append(self.source.sample(row))
        if not drafted:
            return Draft()
        q = tuple(float(row[token]) for row, token in zip(rows, drafted, strict=True))
        return Draft.chain(tuple(drafted), q, DenseProbs(torch.stack(rows)))

    def observe(self, step: Step) -> None: ...


class DraftVocabularyDrafter:
    """Sample a chain, or `width` siblings without replacement, from a part of the vocabulary; q is sparse."""

    def __init__(
        self, model: TableModel, sampling: SamplingParams, source: Any, ids: Sequence[int], width: int = 1
    ) -> None:
        self.model, self.sampling, self.source, self.ids, self.width = model, sampling, source, list(ids), width

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        drafted: list[int] = []
        parents: list[int] = []
        rows: list[SparseRow] = []
        depth, leaf = 0, -1
        while budget.may_extend(len(drafted), logits := self._logits(tokens, drafted[:depth])):
            values = replace(self.sampling, repetition_penalty=1.0, bad_words=(), banned=None)(logits[None], [])[0]
            row = SparseRow(torch.tensor(self.ids), values, self.model.vocab)
            for _ in range(min(self.width, int((values > 0).sum()))):
                rows.append(row)
                parents.append(leaf)
                drafted.append(self.source.sample_sparse(row, len(tokens) + depth))
                row = without(row, drafted[-1])
            if self.width > 1:
                break  # one level
            depth, leaf = depth + 1, len(drafted) - 1
        if not drafted:
            return Draft()
        q = [float(row.values[self.ids.index(token)]) for row, token in zip(rows, drafted, strict=True)]
        probs = SparseProbs(rows[0].ids, torch.stack([row.values for row in rows]), self.model.vocab)
        return Draft(tuple(drafted), tuple(parents), tuple(q), probs)

    def _logits(self, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        return self.model.logits([*tokens, *drafted])[self.ids]

    def observe(self, step: Step) -> None: ...


class ForestDrafter:
    """Chains of a model's greedy tokens with wrong siblings strewn in: forests that a cache must survive."""

    def __init__(self, inner: Drafter, vocab: int, seed: int = 0) -> None:
        self.inner, self.vocab, self.rng = inner, vocab, random.Random(seed)

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        drafted: list[int] = []
        parents: list[int] = []
        leaf = -1
        for token in self.inner.propose(tokens, budget).tokens:
            siblings = [token, *(self.rng.randrange(self.vocab) for _ in range(self.rng.randrange(3)))]
            self.rng.shuffle(siblings)
            first = len(drafted)
            parents += [leaf] * len(siblings)
            drafted += siblings
            leaf = first + siblings.index(token)
        return Draft(tuple(drafted), tuple(parents))

    def observe(self, step: Step) -> None:
        self.inner.observe(step)


def run(
    prompt: Sequence[int],
    verifier: Verifier,
    drafter: Drafter,
    gamma: DraftLengthPolicy,
    max_tokens: int,
    stop: Sequence[int] = (),
    first_target: bool = True,
) -> list[Step]:
    """All steps of a run under a clock that counts its readings."""
    ticks = count()
    return list(
        decode(
            prompt,
            verifier,
            drafter,
            gamma,
            max_tokens=max_tokens,
            stop=set(stop),
            clock=lambda: float(next(ticks)),
            first_target=first_target,
        )
    )


def committed(steps: Iterator[Step] | list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


CONTEXT = 64
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**LLAMA),
    "qwen2": Qwen2Config(**LLAMA),
    "qwen3": Qwen3Config(**LLAMA, head_dim=8),
    "mistral-sliding": MistralConfig(**LLAMA, sliding_window=8),
    "gpt-neox": GPTNeoXConfig(**SIZES, intermediate_size=64, max_position_embeddings=CONTEXT),
    "gpt2": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT),
}


HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
STACKS = {"vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, **HEADS}
STACKS |= {"max_position_embeddings": CONTEXT, "pad_token_id": 1, "forced_eos_token_id": None}
STACKS |= {"tie_word_embeddings": False}  # otherwise a random model repeats its last token
GEMMA = {**LLAMA, "head_dim": 8, "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 2}
ENCODERS: dict[str, PretrainedConfig] = {
    "t5": T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    ),
    "bart": BartConfig(**STACKS, bos_token_id=0, decoder_start_token_id=2, forced_bos_token_id=0),
    "marian": MarianConfig(**STACKS, decoder_start_token_id=1),
    "t5gemma": T5GemmaConfig(
        encoder=T5GemmaModuleConfig(**GEMMA), decoder=T5GemmaModuleConfig(**GEMMA), vocab_size=61, bos_token_id=2
    ),
}


def from_config(config: PretrainedConfig) -> PreTrainedModel:
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_config(copy.deepcopy(config))  # models may change it


def sharp_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Random model with clearly different distributions."""
    torch.manual_seed(seed)
    model = from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(4.0)
    return model


def tiny_model(kind: str) -> PreTrainedModel:
    model = sharp_model({**CONFIGS, **ENCODERS}[kind])
    model.generation_config.eos_token_id = None
    return model


def most_probable(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return the most probable token at each position of `tokens`: equal to `tokens` if the text is greedy."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist()


def blurred(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Drafter that agrees with `model` often but not always."""
    copy = from_config({**CONFIGS, **ENCODERS}[kind])
    copy.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(0.03 * parameter.std(correction=0) * torch.randn_like(parameter))
    return copy.eval().requires_grad_(False)


TEXTS = [
    "def add(a, b):\n    return a + b\n\n\n"
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n",
    "for i in range(10):\n    print(i, 'naïve café', '東京', '🙂🙃')\n",
]


def byte_level_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Tokenizer like those of GPT-2 and Llama 3: characters may be split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:1], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template)


def letters_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Ids are positions in `words`; a word of two letters is the merge of these letters."""
    merges = [(word[0], word[1]) for word in words if len(word) == 2]
    bpe = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer like those of Llama 2 and Mistral: leading spaces by convention, bytes as a fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:1], trainer)
    state = json.loads(tokenizer.to_str())  # bytes are ordinary tokens, because decoding skips special tokens
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def save_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int = 0, shards: str = "5GB", **changes: Any
) -> Path:
    torch.manual_seed(seed)
    sizes = {**LLAMA, "hidden_size": 64, "max_position_embeddings": 128, "vocab_size": len(tokenizer)}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "eos_token_id": tokenizer.eos_token_id, **changes}))
    model.save_pretrained(folder, max_shard_size=shards)
    tokenizer.save_pretrained(folder)
    return folder


class Counting:
    """Counts the rows a model is fed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.rows: list[int] = []
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        self.rows.append(kwargs["input_ids"].shape[1])


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def up_to(limit: int) -> DraftBudget:
    return DraftBudget(limit, Fixed(limit))
