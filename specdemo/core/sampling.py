"""Logits processing and sampling; temperature 0 is the one-hot distribution of the largest logit."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdemo.core.distributions import DenseProbs, SparseProbs, SparseRow
from specdemo.core.errors import UserError
from specdemo.core.step import Draft, Origin, TopTokens
from specdemo.core.texts import BannedText
from specdemo.native import sampling as native
from specdemo.native.interface import SamplingStruct

_LARGEST = torch.finfo(torch.float32).max


# Function of all tokens before a position and its float32 logits `[vocab]`. If it depends on these only, p and q are
# processed alike, and the text is exact.
LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]


@dataclass(frozen=True)
class SamplingParams:
    """Parameters in the order of transformers: repetition penalty, bad words, temperature, top-k, top-p, min-p.

    Custom `processors` follow the bad words. The numbers have the same names in options, network, endpoint, other
    engines and C, where every representation is made from this class.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 disables the limit
    top_p: float = 1.0
    min_p: float = 0.0  # least share of the largest probability (2407.01082)
    repetition_penalty: float = 1.0
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences, as in transformers
    banned: BannedText | None = None
    processors: tuple[LogitsProcessor, ...] = ()

    @classmethod
    def of(cls, values: Any, **others: Any) -> SamplingParams:
        """Return the parameters with the numbers of `values`, and the fields `others`."""
        return cls(**{name: getattr(values, name) for name in SAMPLING_NUMBERS}, **others)

    @property
    def numbers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAMPLING_NUMBERS}

    @property
    def truncation(self) -> dict[str, float]:
        """Limits of the distribution that are not off, by name."""
        return {
            name: value
            for name, value in self.numbers.items()
            if name not in ("temperature", "repetition_penalty") and value != getattr(SamplingParams, name)
        }

    @cached_property
    def struct(self) -> SamplingStruct:
        """Parameters of `logits_to_probs` in C."""
        return SamplingStruct(**{name: self.numbers[name] for name, *_ in SamplingStruct._fields_})

    @property
    def needs_paths(self) -> bool:
        banned = bool(self.bad_words) or self.banned is not None
        return self.repetition_penalty != 1.0 or banned or bool(self.processors)

    def __call__(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        return self.logits_to_probs(self.process_logits(logits, paths))

    def draw(self, logits: Tensor, exp_noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample from processed logits `[rows, vocab]` without host synchronisation.

        Returns tokens `[rows]`, their distributions `[rows, vocab]`, and the largest logits with the probabilities of
        the tokens `[rows, 2]`. `exp_noise` `[vocab]`: see `Noise.write_exp_noise`; ignored at temperature 0.
        """
        best = logits.argmax(1, keepdim=True)
        largest = logits.gather(1, best)
        if self.temperature == 0:
            return best[:, 0], logits, torch.cat((largest, largest), 1)
        probs = self.logits_to_probs(logits)
        tokens = (probs / exp_noise).argmax(1, keepdim=True)
        return tokens[:, 0], probs, torch.cat((largest, probs.gather(1, tokens)), 1)

    def process_logits(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Apply penalties, bad words and custom processors; raise `UserError` for NaN or infinite logits."""
        logits = self.constrain(logits, paths)
        self.refuse_broken(native.largest_logits(logits)[1])
        return logits

    def constrain(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Apply repetition penalty, bad words and custom processors; return float32 logits `[rows, vocab]`.

        `paths[r]`: all tokens before row r, if `needs_paths`.
        """
        if not self.needs_paths:
            return logits.float()
        return torch.stack([self._process_row(row, path) for row, path in zip(logits.float(), paths, strict=True)])

    def logits_to_probs(self, logits: Tensor) -> Tensor:
        """Apply temperature, softmax and truncation to processed logits; return `[rows, vocab]`."""
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
        return native.token_distributions(logits, self)

    def _process_row(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """Apply repetition penalty (CTRL, 1909.05858), then bad words, to one row `[vocab]`."""
        if self.repetition_penalty != 1.0 and len(path):
            seen = torch.tensor(sorted(set(path)), device=logits.device)
            old = logits[seen]
            new = torch.where(old < 0, old * self.repetition_penalty, old / self.repetition_penalty)
            logits = logits.index_put((seen,), new)
        banned = [
            word[-1] for word in self.bad_words if len(word) == 1 or tuple(path[1 - len(word) :]) == tuple(word[:-1])
        ]
        if self.banned is not None:
            banned += [token for token in self.banned.tokens(path) if token < len(logits)]
        if banned:
            logits = logits.index_fill(0, torch.tensor(banned, device=logits.device), -torch.inf)
            if torch.isneginf(logits.amax()):
                raise UserError("the bad words exclude every token: ban fewer words")
        return self._apply_processors(logits, path) if self.processors else logits

    def _apply_processors(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        shape = logits.shape
        for processor in self.processors:
            logits = processor(path, logits.clone())  # the original belongs to the model
            if not isinstance(logits, Tensor) or logits.shape != shape:
                raise UserError(f"a logits processor must return a tensor of shape {list(shape)}, not {_shape(logits)}")
        if torch.isneginf(logits.amax()):
            raise UserError("the logits processors exclude every token: leave one token finite")
        return logits.float()

    def refuse_broken(self, largest: Sequence[float]) -> None:
        """Raise `UserError` unless the largest logits are finite, also after division by the temperature."""
        limit = _LARGEST * min(1.0, self.temperature or 1.0)
        for logit in largest:
            if not abs(logit) <= limit:
                raise UserError("the model returned NaN or infinite logits: try dtype float32, or another checkpoint")


SAMPLING_NUMBERS = tuple(field.name for field in fields(SamplingParams) if field.type in ("int", "float"))


def _shape(value: object) -> object:
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


def is_on_host(x: Tensor) -> bool:
    """Return True if reading `x` does not wait for a device."""
    return x.device.type == "cpu"


def fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Truncate logits or pad with -inf to `[rows, vocab_size]`."""
    return pad(logits, (0, vocab_size - logits.shape[1]), value=-torch.inf)


def top_tokens(distributions: Tensor, count: int) -> list[TopTokens]:
    """Return entropy and the `count` most probable tokens of each row `[rows, vocab]`, without zero mass."""
    return [TopTokens(entropy, tuple(top)) for entropy, top in native.summaries(distributions, count)]


def with_tokens(
    tops: Sequence[TopTokens], distributions: Tensor, also: Sequence[Collection[int]]
) -> tuple[TopTokens, ...]:
    """Add the tokens `also[r]` of each row `[rows, vocab]` to its most probable tokens."""
    rows = [dict(row.top) for row in tops]
    missing = [(r, token) for r, extra in enumerate(also) for token in extra if token not in rows[r]]
    if missing:
        index, token_ids = torch.tensor(missing, device=distributions.device).T
        for (r, token), p in zip(missing, distributions[index, token_ids].tolist(), strict=True):
            rows[r][token] = p
    return tuple(
        TopTokens(old.entropy, tuple(sorted(row.items(), key=lambda pair: -pair[1])))
        for old, row in zip(tops, rows, strict=True)
    )


class Noise:
    """Random stream determined by seed and name; drafting, acceptance and correction need independent streams."""

    def __init__(self, seed: int, stream: str) -> None:
        self._seed = random.Random(f"{seed}/{stream}").getrandbits(63)
        self._uniform = random.Random(self._seed)
        self._generators: dict[torch.device, torch.Generator] = {}

    def test(self, probability: float) -> tuple[bool, float]:
        """Return True with this probability, and the uniform number compared with it."""
        u = self._uniform.random()
        return u < probability, u

    def uniforms(self, count: int) -> list[float]:
        return [self._uniform.random() for _ in range(count)]

    def sample(self, probs: Tensor, position: int = 0) -> int:
        """Sample from `probs` `[vocab]`; `position` is ignored."""
        if is_on_host(probs):
            return native.sample_at(probs, self._uniform.random())
        return int(self.sample_on_device(probs))

    def sample_sparse(self, row: SparseRow, position: int = 0) -> int:
        return int(row.ids[self.sample(row.values)])

    def sample_on_device(self, probs: Tensor, position: int = 0) -> Tensor:
        """Return argmax p / Exp(1) `[1]` on the device, without host synchronisation."""
        exp_noise = torch.empty_like(probs)
        self.write_exp_noise(exp_noise)
        return (probs / exp_noise).argmax().unsqueeze(0)

    def write_exp_noise(self, out: Tensor, position: int = 0) -> None:
        """Write the exponential random numbers `[vocab]` that determine the next token on this device."""
        out.exponential_(generator=self.generator(out.device))

    def generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


class SharedNoise:
    """Noise keyed by position and shared by drafter and target (Gumbel coupling, 2408.07978).

    Both sample argmax p / E with the same exponential E per position, so the output depends only on target and seed. E
    is generated on the CPU to be equal on all devices.
    """

    def __init__(self, seed: int, memory: int = 128) -> None:
        self._seed, self._memory = seed, memory
        self._noise_by_position: dict[int, Tensor] = {}

    def sample(self, probs: Tensor, position: int) -> int:
        return int(self.sample_on_device(probs, position))

    def sample_sparse(self, row: SparseRow, position: int) -> int:
        exp_noise = self._exp_noise(position, row.vocab_size).to(row.ids.device)
        return int(row.ids[(row.values / exp_noise[row.ids]).argmax()])

    def sample_on_device(self, probs: Tensor, position: int) -> Tensor:
        exp_noise = self._exp_noise(position, len(probs))
        return (probs / exp_noise.to(probs.device, non_blocking=True)).argmax().unsqueeze(0)

    def write_exp_noise(self, out: Tensor, position: int) -> None:
        out.copy_(self._exp_noise(position, len(out)), non_blocking=True)

    def _exp_noise(self, position: int, vocab_size: int) -> Tensor:
        if position not in self._noise_by_position:
            if len(self._noise_by_position) >= self._memory:
                del self._noise_by_position[next(iter(self._noise_by_position))]
            key = random.Random(f"{self._seed}/{position}").getrandbits(63)
            self._noise_by_position[position] = torch.empty(vocab_size, dtype=torch.float32).exponential_(
                generator=torch.Generator().manual_seed(key)
            )
        return self._noise_by_position[position]


class ChainSampler:
    """Samples a drafted chain after `start` tokens and records its distributions.

    A head sets `ids`, the tokens of the logits, which are indices otherwise. `origin`: of all tokens, if known.
    """

    ids: Tensor | None = None

    def __init__(
        self,
        sampling: SamplingParams,
        noise: Noise | SharedNoise,
        start: int,
        vocab_size: int,
        origin: Origin | None = None,
    ) -> None:
        self.sampling, self.vocab_size = sampling, vocab_size
        self._origin = origin
        self._noise, self._start = noise, start
        self._max_logits: list[float] = []
        self._device_max_logits: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._token_probs: list[float] = []
        self._unread: list[tuple[torch.Generator, Tensor]] = []  # generators and their states before each token

    def __call__(self, logits: Tensor, i: int) -> Tensor | int:
        """Return token i of raw logits `[1, own vocabulary]`: a number, or `[1]` on the device."""
        logits = fitted(logits, self.vocab_size).float()
        if on_host := is_on_host(logits):
            (token,), values = native.largest_logits(logits)
            self._max_logits += values
        else:
            self._device_max_logits.append(logits.amax(1))
        if self.sampling.temperature == 0:
            return token if on_host else logits.argmax(1)
        probs = self.sampling.logits_to_probs(logits)
        self._probs.append(probs)
        return (self._noise.sample if on_host else self._noise.sample_on_device)(probs[0], self._start + i)

    def write_exp_noise(self, out: Tensor) -> bool:
        """Write the random numbers `[count, size]` that determine tokens on a device; return False if impossible."""
        if self.sampling.temperature and self.ids is not None and not isinstance(self._noise, Noise):
            return False
        if self.sampling.temperature:
            for i, row in enumerate(out):
                if isinstance(self._noise, Noise):
                    generator = self._noise.generator(row.device)
                    self._unread.append((generator, generator.get_state()))
                self._noise.write_exp_noise(row, self._start + i)
        return True

    def rewind_noise(self, count: int) -> None:
        """Keep the first `count` tokens; the random numbers of the others determine later tokens."""
        if count < len(self._unread):
            generator, state = self._unread[count]
            generator.set_state(state)

    def uniforms(self, count: int) -> list[float] | None:
        """Return random numbers that determine `count` tokens."""
        if self.sampling.temperature == 0:
            return []
        return self._noise.uniforms(count) if isinstance(self._noise, Noise) else None

    def record(self, max_logits: list[float], token_probs: list[float], probs: Tensor | None) -> None:
        """Record largest logits, token probabilities and distributions `[count, vocab_size]`."""
        self._max_logits = max_logits
        self._token_probs = token_probs
        self._probs = [] if probs is None else [probs]

    def chain(self, tokens: Sequence[int]) -> Draft:
        """Return the draft of these tokens. Raises `UserError` for broken logits."""
        origin = () if self._origin is None else (self._origin,) * len(tokens)
        self.sampling.refuse_broken(self._max_logits or torch.cat(self._device_max_logits).tolist())
        if not self._probs:
            return Draft.chain(tuple(tokens), origin=origin)
        probs = self._probs[0] if len(self._probs) == 1 else torch.cat(self._probs)
        if self.ids is not None:
            sparse = SparseProbs(self.ids, probs, self.vocab_size)
            return Draft.chain(tuple(tokens), tuple(self._token_probs), sparse, origin)
        recorded = len(self._token_probs) == len(tokens)
        token_probs = self._token_probs if recorded else probs[range(len(tokens)), tokens].tolist()
        return Draft.chain(tuple(tokens), tuple(token_probs), DenseProbs(probs), origin)


class UnreadDraft(Draft):
    """A chain that a device drafts; the host reads it when a field is first needed.

    Tensors also contain tokens after the end of the draft. `ids` `[capacity]`: tokens. `values` `[capacity, 4]`: token,
    largest logit, probability of the token, and 1 before the end or 0 after it. `rows` `[capacity, size]`:
    distributions, 0 after the end. `started`, `ended`: CUDA events.
    """

    __setattr__ = object.__setattr__  # fields of a draft are frozen, and stay unset here

    def __init__(
        self, sampler: ChainSampler, ids: Tensor, values: Tensor, rows: Tensor, started: Any, ended: Any
    ) -> None:
        self.sampler = sampler
        self.ids = ids
        self.values = values
        self.rows = rows
        self.started = started
        self.ended = ended
        self.on_read: Callable[[list[int]], object] = lambda tokens: None
        self.known: Draft | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an unset field."""
        return getattr(self.read(), name)

    def __bool__(self) -> bool:
        """Return True, without waiting for the device, unless the draft was read and is empty."""
        return self.known is None or bool(self.known)

    @property
    def is_chain(self) -> bool:
        return True

    @property
    def device_s(self) -> float:
        self.read()
        return self.started.elapsed_time(self.ended) / 1000

    @property
    def included(self) -> Tensor:
        """Column `[capacity, 1]` of `values`: 1 before the end of the draft."""
        return self.values[:, 3:]

    def probs_on_device(self) -> Tensor | None:
        """Return the distributions `[capacity, vocab]`, if tokens are sampled."""
        sampler = self.sampler
        if sampler.sampling.temperature == 0:
            return None
        return self.rows if sampler.ids is None else SparseProbs(sampler.ids, self.rows, sampler.vocab_size).dense()

    def read(self) -> Draft:
        return self.fill(self.values.T.tolist()) if self.known is None else self.known

    def fill(self, columns: Sequence[Sequence[float]]) -> Draft:
        """Return the draft for the transferred columns of `values`."""
        tokens, largest, token_probs, included = columns
        length = int(sum(included))
        sampler, tested = self.sampler, max(1, length)
        sampler.rewind_noise(length)
        if sampler.sampling.temperature == 0:
            sampler.record(list(largest[:tested]), [], None)
        else:
            sampler.record(list(largest[:tested]), list(token_probs[:length]), self.rows[:length].clone())
        new = [int(token) for token in tokens[:length]]
        self.on_read(new)
        self.known = sampler.chain(new)
        return self.known


def unread(draft: Draft) -> UnreadDraft | None:
    """Return a draft that the host has not read."""
    return draft if isinstance(draft, UnreadDraft) and draft.known is None else None
