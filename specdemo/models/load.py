"""Loaded models: from files, without executing their code, or in memory of the caller; their digests."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from logging import ERROR, getLogger
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig
from transformers.utils import logging

from specdemo import __version__
from specdemo.core.decode import Verifier
from specdemo.core.errors import UserError
from specdemo.core.events import Loading, ReportProgress, ignore_progress
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier, VerifierInputs, configured_rule
from specdemo.models.batch_invariance import (
    COMPARED_ROWS,
    NO_COSTS,
    BatchInvariance,
    check_invariance,
    compared_context,
)
from specdemo.models.cache_check import cache_support, pack_if_exact
from specdemo.models.chat_prompt import turn_end
from specdemo.models.engines.engine import FusedWeights
from specdemo.models.engines.generic import auto_class, has_encoder, opening, refuse_recurrent
from specdemo.models.engines.llama_weights import LlamaWeights, is_spread
from specdemo.models.engines.native_weights import NativeWeights, transformers_reason
from specdemo.models.engines.row_linear import kernels_missing, replace_linears
from specdemo.models.engines.select import engine_of
from specdemo.models.gguf_checkpoint import gguf_config, gguf_tokenizer, read_gguf
from specdemo.models.hub import Hub, file_digests, local_shapes
from specdemo.models.kv_cache import CachedModel, context_length
from specdemo.models.limited_process import try_architecture
from specdemo.models.llama_checkpoint import read_checkpoint
from specdemo.models.memory import free_bytes, trim_heap, weight_bytes
from specdemo.models.quantization import check_quantization, load_options, skeleton
from specdemo.models.spec import QUANTIZATIONS, SPREAD, ModelSpec, find_device, is_gguf
from specdemo.models.tokenizer import check_ids, open_tokenizer
from specdemo.models.untrusted import (
    FAMILIES,
    check_tensors,
    check_weight_count,
    converts_errors,
    model_errors,
    read_settings,
)
from specdemo.native.build import NativeUnavailable, native_library
from specdemo.native.sampling import largest_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OTHER_TASK = re.compile("For(?!CausalLM|ConditionalGeneration)[A-Z]")  # in names of architectures
_RESERVE = 0.1  # share of each device for KV cache and activations


@dataclass(frozen=True)
class LoadedModel:
    """Model in this process with its tokenizer and engine: drafter, or `Target`."""

    spec: ModelSpec
    model: PreTrainedModel | FusedWeights
    tokenizer: PreTrainedTokenizerBase
    weight_bytes: int
    engine: str  # "native", "lean" or "transformers", with ": NOTE"
    measured: bool = True  # batch invariance is not assumed if False

    @property
    def name(self) -> str:
        """Name of the architecture, since directories and GGUF files have long names."""
        return type(self.model).__name__

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def invariance(self) -> BatchInvariance:
        """Batch invariance, measured once; `cached_property` would hold a lock while other runs use the device."""
        if (result := self.__dict__.get("_invariance")) is None:
            result = check_invariance(self.model) if self.measured else BatchInvariance(False, 1, 0, NO_COSTS)
            self.__dict__["_invariance"] = result
        return result

    @property
    def encoder(self) -> bool:
        return has_encoder(self.model.config)

    @property
    def opening(self) -> list[int]:
        return check_ids(opening(self.model), self.vocab_size) if self.encoder else self.tokenizer.encode("")

    def bit_equal(self, longest_draft: int | None, length: int) -> bool:
        """See `Target.bit_equal`."""
        if self.invariance.by_construction or not self.invariance.equal:
            return self.invariance.equal
        compared = longest_draft is not None and longest_draft < COMPARED_ROWS
        return compared and length <= compared_context(self.model)

    @property
    def pass_costs(self) -> dict[int, float]:
        return self.invariance.cost

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size

    @property
    def context(self) -> int:
        return context_length(self.model)

    @property
    def chains_only(self) -> str:
        return engine_of(self.model).chains_only

    def open_cache(self, open: Callable[..., CachedModel], taps: tuple[int, ...]) -> CachedModel:
        return open(self, "target", pad=self.invariance.pad, taps=taps)

    def verifier(self, inputs: VerifierInputs) -> Verifier:
        """Return a verifier with the acceptance rule of the options."""
        options = inputs.options
        assert inputs.target_cache is not None
        return ModelVerifier(
            inputs.target_cache.score,
            inputs.sampling,
            configured_rule(options.rule, adjust=not options.skip_sample_adjustment, threshold=options.threshold),
            accept=inputs.accept,
            correct=inputs.correct,
            candidates=inputs.candidates,
            top=options.top,
            logprobs=inputs.logprobs,
            compares=inputs.target_cache.engine.compares,
        )

    def close(self) -> None:
        """Keep the model, which belongs to a pool."""

    def release(self) -> None:
        """Free memory that is retained for later texts."""
        if (engine := getattr(self.model, "engine", None)) is not None:
            engine.release()

    @property
    def environment(self) -> dict[str, Any]:
        failure, vectors = getattr(self.model, "graph_failure", ""), engine_of(self.model).vectors
        return {
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "engine": f"{self.engine}; no CUDA graphs: {failure}" if failure else self.engine,
            "parity": asdict(self.invariance),
            "target_bytes": self.weight_bytes,
            **({"vectors": vectors} if vectors else {}),
        }

    @property
    def stop(self) -> frozenset[int]:
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        listed = ids if isinstance(ids, list) else [ids]
        ends = (*listed, self.tokenizer.eos_token_id, turn_end(self.tokenizer))
        return frozenset(token for token in ends if token is not None)


@converts_errors
def load(
    spec: ModelSpec, hub: Hub | None = None, report: ReportProgress = ignore_progress, warm: bool = True
) -> LoadedModel:
    """Load a model into the fastest supported engine. Raises `UserError`.

    `warm`: check the passes of other architectures and run one, so that later timings exclude first-call costs.
    Otherwise the first text checks them, and no measurement is made.
    """
    hub = hub or Hub()
    model: PreTrainedModel | FusedWeights
    checkpoint = (read_gguf if is_gguf(spec.name) else read_checkpoint)(spec.resolved(), hub, report)
    model, tokenizer = checkpoint or load_with_transformers(spec, hub, report)
    reason = transformers_reason(model, model.device)
    note = use_row_kernels(model) or getattr(model, "note", "")
    if reason:
        if warm:
            reason += cache_support(model).note
            pack_if_exact(model)
        engine = f"transformers: {reason}; {note}" if note else f"transformers: {reason}"
    else:
        spec = replace(spec, activations=getattr(model, "activations", spec.activations))
        model, engine = _to_engine_weights(model)
        engine += f": {note}" if note else ""
    if warm:
        with closing(CachedModel(model)) as cached, cached.engine.recording_disabled():
            # CUDA graphs are recorded only in the device thread
            largest_logits(cached.score([0], Draft.chain((0,))))
    turn_end(tokenizer)  # now, since it starts a process
    trim_heap()
    size = engine_of(model).weight_bytes if isinstance(model, FusedWeights) else weight_bytes(model)
    return LoadedModel(spec, model, tokenizer, size, engine, warm)


def use_row_kernels(model: PreTrainedModel) -> str:
    """Replace the quantised layers of bitsandbytes on a GPU; return a note if that is impossible."""
    if not hasattr(model, "hf_quantizer") or model.device.type == "cpu" or is_spread(model):
        return ""
    if missing := kernels_missing(model.device, model.dtype):
        return f"kernels of bitsandbytes, {missing}"
    replace_linears(model, model.dtype)
    return ""


def _to_engine_weights(model: PreTrainedModel) -> tuple[FusedWeights, str]:
    """Convert a model, whose matrices are released; return weights and engine name."""
    if model.device.type != "cpu":
        return LlamaWeights(model, consume=True), "lean"
    library = native_library()
    if isinstance(library, NativeUnavailable):
        return LlamaWeights(model, consume=True), f"lean: no native engine, {library}"
    return NativeWeights(model, consume=True), "native"


@converts_errors
def load_with_transformers(
    spec: ModelSpec, hub: Hub | None = None, report: ReportProgress = ignore_progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoTokenizer

    hub, spec = hub or Hub(), spec.resolved()
    if is_gguf(spec.name):
        raise UserError(f"{spec.name} does not run in transformers: choose its safetensors checkpoint")
    config = configuration(spec, hub, report)
    folder = hub.weights(spec.name, spec.revision, report)
    check_weight_count(spec.name, folder, skeleton(config))
    logging.disable_progress_bar()
    getLogger("bitsandbytes.autograd._functions").setLevel(ERROR)
    tokenizer = open_tokenizer(spec.name, folder, AutoTokenizer)
    with model_errors(spec.name, folder=folder), _reported_weights(spec.title, report):
        model, loaded = auto_class(config).from_pretrained(
            folder,
            dtype=getattr(torch, spec.dtype),
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # `check_tensors` reports mismatched sizes with other errors
            output_loading_info=True,
            **placement(spec),
            **load_options(spec),
        )
        shapes = {} if hasattr(model, "hf_quantizer") else local_shapes(spec.name, folder)
        check_tensors(spec.name, model, loaded, {name: dtype for name, (dtype, _) in shapes.items()})
    return model.eval().requires_grad_(False), tokenizer


@converts_errors
def read_tokenizer(spec: ModelSpec, hub: Hub | None = None) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    hub = hub or Hub()
    configuration(spec.resolved(), hub)
    if is_gguf(spec.name):
        return gguf_tokenizer(spec, hub)
    return open_tokenizer(spec.name, hub.settings(spec.name, spec.revision), AutoTokenizer)


def configuration(spec: ModelSpec, hub: Hub, report: ReportProgress = ignore_progress) -> PretrainedConfig:
    """Load the configuration of a resolved spec. Raises `UserError` for unsupported models."""
    if is_gguf(spec.name):
        return gguf_config(spec, hub, report)
    from transformers import AutoConfig

    folder = hub.settings(spec.name, spec.revision, report)
    if read_settings(spec.name, folder / "config.json").get("model_type") not in FAMILIES:
        try_architecture(spec.name, folder)
    with model_errors(spec.name, "has a configuration unknown to this transformers version", folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kinds = auto_class(config)._model_mapping
    names = [] if has_encoder(config) else config.architectures or []
    is_encoder = getattr(config, "is_decoder", None) is False
    others = [name for name in names if _OTHER_TASK.search(name) or (is_encoder and name.endswith("Model"))]
    if type(config) not in kinds or (names and others == names):
        raise UserError(
            f"{spec.name} is not a causal language model ({config.model_type}): choose a text generation model"
        )
    refuse_recurrent(kinds[type(config)], config)
    check_quantization(spec, config)
    return config


def placement(spec: ModelSpec) -> dict[str, Any]:
    """Return the options of `from_pretrained` that assign devices."""
    if spec.device != SPREAD:
        return {"device_map": {"": find_device(spec.device)}}
    gpus = range(torch.cuda.device_count())
    capacity: dict[str | int, int] = {i: int(free_bytes(torch.device("cuda", i)) * (1 - _RESERVE)) for i in gpus}
    if not (gpus and QUANTIZATIONS[spec.quantization].bits):
        capacity["cpu"] = int(free_bytes(torch.device("cpu")) * (1 - _RESERVE))
    return {"device_map": "sequential", "max_memory": capacity}


@contextmanager
def _reported_weights(name: str, report: ReportProgress) -> Iterator[None]:
    """Report progress, without warnings of `transformers`."""

    def bar(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tensors = args[0] if args else options.get("iterable")
        return make(*args, **options) if tensors is None else counted(list(tensors))

    def counted(tensors: list[Any]) -> Iterator[Any]:
        for i, tensor in enumerate(tensors, 1):
            yield tensor
            report(Loading(f"reading {name}, weight {i:,} of {len(tensors):,}", i, len(tensors)))

    before, verbosity = logging.set_tqdm_hook(bar), logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
        logging.set_verbosity(verbosity)


def in_memory_model(role: str, model: Any, tokenizer: PreTrainedTokenizerBase | None) -> LoadedModel:
    """Share the weights of `model`. Raises `UserError` unless it is a supported `transformers` model."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise UserError(f"the {role} is a {type(model).__name__}: pass a transformers model that generates text")
    if tokenizer is None:
        raise UserError("models in memory need their tokenizer: pass tokenizer=")
    origin = f" ({model.name_or_path})" if model.name_or_path else ""
    spec = ModelSpec(f"in-memory {role} {type(model).__name__}{origin}")
    shared = share_weights(model)
    with closing(CachedModel(shared)) as cached:
        cached.score([0], Draft.chain((0,)))  # rejects unsupported models
    engine = f"transformers: in-memory model, weights shared{cache_support(shared).note}"
    return LoadedModel(spec, shared, tokenizer, weight_bytes(shared), engine)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the module tree of `model` in eval mode, sharing every parameter and buffer.

    Changes of mode, configuration and buffers affect only the copy. Raises `UserError` for LLM.int8() layers, which
    modify their weights in the first pass.
    """
    tensors = (*model.parameters(), *model.buffers())
    if any(type(tensor).__name__ == "Int8Params" for tensor in tensors):
        raise UserError("8-bit models in memory are not supported: load the pair by name with quantization int8")
    shared = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
    # other implementations ignore the masks of draft trees
    if shared.config._attn_implementation not in ("eager", "sdpa"):
        shared.set_attn_implementation("sdpa")
    return shared


@dataclass(frozen=True)
class ModelIdentity:
    """Digests of a loaded model: equal `model`, equal distributions; with equal `numerics`, equal bits."""

    model: str
    numerics: str


def identify(target: LoadedModel, tokenizer: str, hub: Hub) -> ModelIdentity:
    """Hash a model and its engine; `tokenizer` is a fingerprint."""
    spec, model = target.spec.resolved(), target.model
    parts = {
        "files": [*file_digests(spec.name, spec.revision, hub).values()],
        "form": (spec.dtype, spec.quantization, spec.activations),
        "keys and values": str(getattr(model, "kv_dtype", model.dtype)),
        "text": (tokenizer, sorted(target.stop), target.context, target.vocab_size),
    }
    engine = engine_of(model)
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    numerics = (target.engine, __version__, engine.vectors, gpu, "" if engine.batch_invariant else torch.__version__)
    return ModelIdentity(_digest(parts), _digest(numerics))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
