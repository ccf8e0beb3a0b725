"""Specs to models ready to run; errors that name the cause.

Safetensors only, and never code that comes with a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models import quantization as quantise
from specdemo.models.batch_invariance import BatchInvariance, check_invariance
from specdemo.models.engines.encoder_decoder import auto_class, has_encoder, opening
from specdemo.models.engines.generic import refuse_recurrent
from specdemo.models.engines.llama_weights import LlamaWeights, unsupported_reason
from specdemo.models.engines.packed_linear import PackedLinear, pack
from specdemo.models.hub import Hub
from specdemo.models.kv_cache import CachedModel
from specdemo.models.memory import drop_mapped_files, given_back_at_once, on_large_pages, weight_bytes
from specdemo.models.placement import place
from specdemo.models.spec import ModelSpec
from specdemo.worker import ReportProgress, TaskProgress, ignore_progress


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, its tokenizer, and what its weights take."""

    spec: ModelSpec
    model: PreTrainedModel | LlamaWeights
    tokenizer: PreTrainedTokenizerBase
    weight_bytes: int
    engine: str  # "lean", or "transformers" and why

    @cached_property
    def invariance(self) -> BatchInvariance:
        """Whether several rows cost and give what one does; asked once, on first use."""
        return check_invariance(self.model)

    @property
    def encoder(self) -> bool:
        """Whether an encoder reads the prompt, and what is decoded begins anew."""
        return has_encoder(self.model.config)

    @property
    def opening(self) -> list[int]:
        """The tokens that stand before any decoded text."""
        return opening(self.model) if self.encoder else self.tokenizer.encode("")

    @property
    def bit_equal(self) -> bool:
        """Whether several rows give what one does."""
        return self.invariance.equal

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.model.config.get_text_config().vocab_size

    @property
    def environment(self) -> dict[str, Any]:
        """What a trace's header says of how the model runs."""
        return {
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "engine": self.engine,
            "parity": asdict(self.invariance),
            "target_bytes": self.weight_bytes,
        }

    @property
    def stop(self) -> frozenset[int]:
        """Every id that ends a text: the model's own list and the tokenizer's end of sequence."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        listed = ids if isinstance(ids, list) else [ids]
        return frozenset(i for i in (*listed, self.tokenizer.eos_token_id) if i is not None)


def load(
    spec: ModelSpec, hub: Hub | None = None, tell: ReportProgress = ignore_progress, warm: bool = True
) -> LoadedModel:
    """Load a model into the fastest engine that can run it, and run it once: no later figure holds a first call.

    Not `warm`: do not run it, for its device is not there yet. Raises `UserError` with the cause where that cannot be.
    """
    with given_back_at_once():
        model, tokenizer = reference(spec, hub, tell)
    reason = unsupported_reason(model)
    if reason:
        pack(model)
    drop_mapped_files(model)
    if reason:
        loaded = LoadedModel(spec, model, tokenizer, weight_bytes(model), f"transformers: {reason}")
    else:
        lean = LlamaWeights(model, consume=True)
        loaded = LoadedModel(spec, lean, tokenizer, lean.weight_bytes, "lean")
    del model
    on_large_pages(module.packed for module in loaded.model.modules() if isinstance(module, PackedLinear))
    if warm:
        CachedModel(loaded.model).score([0], Draft.chain((0,)))
    return loaded


def reference(
    spec: ModelSpec, hub: Hub | None = None, tell: ReportProgress = ignore_progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model as `transformers` itself runs it, and its tokenizer: what engines are built from and compared with."""
    hub, spec = hub or Hub(), spec.resolved()
    config = configuration(spec, hub, tell)
    folder = hub.weights(spec.name, spec.revision, tell)
    logging.disable_progress_bar()  # it would write over the streamed text
    try:
        with _told_of_weights(spec.title, tell):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            model = auto_class(config).from_pretrained(
                folder,
                dtype=getattr(torch, spec.dtype),
                use_safetensors=True,
                trust_remote_code=False,
                **place(spec, config),
                **quantise.load_options(spec),
            )
    except SafetensorError as error:
        raise UserError(f"the weights of {spec.name} are damaged ({error}): fetch them again") from error
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{spec.name} cannot be loaded: {_first_line(error, folder, spec.name)}") from error
    return model.eval().requires_grad_(False), tokenizer


def read_tokenizer(spec: ModelSpec, hub: Hub | None = None) -> PreTrainedTokenizerBase:
    """A model's tokenizer alone: all that is needed of one that runs elsewhere."""
    hub = hub or Hub()
    configuration(spec.resolved(), hub)
    folder = hub.settings(spec.name, spec.revision)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the tokenizer of {spec.name} cannot be loaded: {_first_line(error, folder, spec.name)}"
        ) from error


def configuration(spec: ModelSpec, hub: Hub, tell: ReportProgress = ignore_progress) -> PretrainedConfig:
    """The model's configuration, which is small: most of what can be wrong shows here, before any weights come.

    `spec` is resolved. Raises `UserError` for kinds of models and quantisations that cannot run.
    """
    folder = hub.settings(spec.name, spec.revision, tell)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except OSError as error:
        raise UserError(
            f"{spec.name} has no configuration that can be read: {_first_line(error, folder, spec.name)}"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{spec.name} is a kind of model that this transformers does not know: "
            f"{_first_line(error, folder, spec.name)}"
        ) from error
    kinds = auto_class(config)._model_mapping
    if type(config) not in kinds:
        raise UserError(
            f"{spec.name} is not a causal language model ({config.model_type}): choose one that continues text"
        )
    refuse_recurrent(kinds[type(config)], config)
    quantise.check_quantization(spec, config)
    return config


def head_apart(spec: ModelSpec, hub: Hub) -> bool:
    """Whether the configuration, as it is written, says that the head is no copy of the embeddings.

    As it is read that may be lost: T5 was tied at first and is not since its version 1.1, and its class in
    `transformers` says that it is, until it finds both in the file.
    """
    written, _ = PretrainedConfig.get_config_dict(hub.settings(spec.name, spec.revision))
    return written.get("tie_word_embeddings") is False


@contextmanager
def _told_of_weights(name: str, tell: ReportProgress) -> Iterator[None]:
    """Tell, of every tensor that `transformers` reads, that it has been read."""

    def bar(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        things = args[0] if args else options.get("iterable")
        return make(*args, **options) if things is None else _counted(things)

    def _counted(things: Iterable[Any]) -> Iterator[Any]:
        all_of_them = list(things)
        for i, thing in enumerate(all_of_them, 1):
            yield thing
            tell(TaskProgress(f"reading {name}, weight {i:,} of {len(all_of_them):,}", i, len(all_of_them)))

    before = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _first_line(error: BaseException, folder: Path, name: str) -> str:
    """What the library says first, with the model's own name where it names a directory of the cache."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return said.replace(str(folder), name)
