"""Metadata of GGUF files: keys in their current, legacy and absent forms give the model of llama.cpp, or a sentence.

The files are untrusted: values are read as written, in bounded time and memory. The tables contain facts of llama.cpp
(src/llama-model.cpp, src/llama-vocab.cpp, src/llama-context.cpp).
"""

import math
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.gguf_models import described, quantize, save_gguf, tiny_for_gguf, vocabulary, write_gguf
from fakes.properties import holds_for, refusal
from fakes.tiny_models import byte_level_tokenizer, sentencepiece_tokenizer
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import strategies as st

from specdemo.core.events import End, Header, StepEvent
from specdemo.generate import generate, load_pair
from specdemo.models.chat_prompt import read_prompt
from specdemo.models.gguf_checkpoint import GgufSettings, gguf_settings
from specdemo.models.gguf_file import read_gguf_header
from specdemo.models.load import load, read_tokenizer
from specdemo.models.memory import peak_process_bytes
from specdemo.models.memory_plan import plan_spec
from specdemo.models.spec import ModelSpec
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

NO_TOKEN = (1 << 32) - 1
SAME, REFUSED = "same", "refused"
SCALE, LEGACY = "rope.scaling.factor", "rope.scale_linear"
TYPE, WINDOW = "rope.scaling.type", "attention.sliding_window"
FORMS: list[tuple[dict[str, Any], str | float]] = [  # a number is the factor of linear scaling
    ({TYPE: "none", SCALE: 4.0}, SAME),
    ({TYPE: "yarn", SCALE: 1.0}, SAME),
    ({SCALE: 0.0, LEGACY: 4.0}, SAME),
    ({TYPE: "linear", SCALE: 4.0}, 4.0),
    ({LEGACY: 4.0}, 4.0),
    ({SCALE: 2.0, LEGACY: 4.0}, 2.0),
    ({TYPE: "yarn", SCALE: 4.0}, REFUSED),
    ({TYPE: "longrope"}, REFUSED),
    ({SCALE: -2.0}, REFUSED),
    ({"rope.scaling.attn_factor": 1.2}, REFUSED),
    ({"rope.scaling.original_context_length": 64, "rope.scaling.finetuned": True}, SAME),
    ({"rope.freq_base": None}, SAME),
    ({"rope.freq_base": 0.0}, REFUSED),
    ({"rope.dimension_count": None}, SAME),
    ({"rope.dimension_count": 8}, REFUSED),
    ({"attention.causal": True}, SAME),
    ({"attention.causal": False}, REFUSED),
    ({"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2], "feed_forward_length": [128, 128]}, SAME),
    ({"attention.head_count_kv": [2, 4]}, REFUSED),
    ({"feed_forward_length": [128]}, REFUSED),
    ({"attention.key_length": None, "attention.value_length": None}, SAME),
    ({"attention.value_length": 32}, REFUSED),
    ({"attention.layer_norm_rms_epsilon": None}, REFUSED),
    ({"expert_count": 0, "expert_used_count": [0, 0], "attn_logit_softcapping": 0.0}, SAME),
    ({"expert_count": 2}, REFUSED),
    ({"attn_logit_softcapping": 2}, REFUSED),
    ({"logit_scale": 0.0, "embedding_scale": 1.0, "attention.scale": 0.25}, SAME),
    ({"logit_scale": 0.5}, REFUSED),
    ({"attention.scale": 0.3}, REFUSED),
    ({WINDOW: 256}, SAME),
    ({WINDOW: 255}, REFUSED),
    ({"vocab_size": 7, "pooling_type": 3, "tensor_data_layout": "Meta AI original pth"}, SAME),
]


def settings(path: Path) -> GgufSettings:
    return gguf_settings(str(path), path)


def spec_of(path: Path) -> ModelSpec:
    return ModelSpec(str(path), "float32", device="cpu").resolved()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_sizes_and_rotation_are_those_of_llama_cpp(architecture: str, tmp_path: Path) -> None:
    base = settings(save_gguf(tmp_path / "base.gguf", architecture)).config
    for i, (changes, result) in enumerate(FORMS):
        keys = {f"{{arch}}.{name}": value for name, value in changes.items()}
        path = save_gguf(tmp_path / f"{i}.gguf", architecture, metadata=keys)
        if result == REFUSED:
            assert "choose" in refusal(load, spec_of(path)), changes
            continue
        expected = dict(base)
        if result != SAME:
            expected["rope_parameters"] = {**base["rope_parameters"], "rope_type": "linear", "factor": result}
        assert settings(path).config == expected, changes


def test_a_missing_count_of_keys_is_that_of_queries(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_for_gguf("llama", tokenizer, num_key_value_heads=4)
    write_gguf(tmp_path / "model.gguf", model, tokenizer, metadata={"{arch}.attention.head_count_kv": None})
    assert settings(tmp_path / "model.gguf").config["num_key_value_heads"] == 4


NAMES = ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
ALL = [f"blk.{layer}.{name}.weight" for layer in range(2) for name in NAMES]
ALL += ["token_embd.weight", "output_norm.weight", "output.weight"]


@pytest.mark.parametrize(
    ("architecture", "options", "words"),
    [
        ("llama", {"metadata": {"general.type": "adapter"}}, "no model, but 'adapter'"),
        ("llama", {"metadata": {"split.count": 3}}, "is a part of a model: join the parts"),
        ("qwen2", {"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "sets rope_freqs.weight"),
        ("llama", {"metadata": {"tokenizer.ggml.suppress_tokens": [1, 2]}}, "forbids 2 tokens"),
        ("llama", {"metadata": {"tokenizer.ggml.model": "none"}}, "tokenizer 'none' is unknown"),
        ("llama", {"tensors": dict.fromkeys(ALL)}, "contains a vocabulary only"),
    ],
)
def test_other_contents_are_named(architecture: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(settings, save_gguf(tmp_path / "model.gguf", architecture, **options))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf")
    first = settings(path)
    assert settings(path) is first
    save_gguf(path, "qwen2", "F16")
    assert settings(path) is not first


# --- tokenizers ---

TEXT = "1234567 it's a.b 12"
PIECES = {  # of TEXT
    "default": "123 456 7 Ġit ' s Ġa . b Ġ 12",
    "llama-bpe dbrx": "123 456 7 Ġit 's Ġa .b Ġ 12",
    "qwen2 deepseek-r1-qwen": "1 2 3 4 5 6 7 Ġit 's Ġa .b Ġ 1 2",
    "smollm starcoder": "1 2 3 4 5 6 7 Ġit 's Ġa . b Ġ 1 2",
    "gpt-2 olmo": "1234567 Ġit 's Ġa . b Ġ12",
    "tekken": "1 2 3 4 5 6 7 Ġit 's Ġa .b Ġ 1 2",
    "gpt-4o": "123 456 7 Ġit's Ġa .b Ġ 12",
    "deepseek-coder": "1 2 3 4 5 6 7 Ġit ' s Ġa . b Ġ 1 2",
}


def test_names_of_rules(tmp_path: Path) -> None:
    named: list[tuple[str | None, str]] = [(name, pieces) for names, pieces in PIECES.items() for name in names.split()]
    for pre, pieces in [*named, (None, PIECES["default"])]:
        path = save_gguf(tmp_path / f"{pre}.gguf", metadata={"tokenizer.ggml.pre": pre})
        splits = read_tokenizer(spec_of(path)).backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
        assert " ".join(piece for piece, _ in splits) == pieces, pre
    assert "default rule" in load(spec_of(path)).engine


ENDS = ("</s>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "<｜end▁of▁sentence｜>")
FILLS = ("<|fim_pad|>", "[PAD]", "<|repo_name|>", "<|file_sep|>")  # end a text of code
NO_ENDS = ("<|im_start|>", "<|user|>", "<|fim_prefix|>", "<fim_suffix>", "<|message|>", "<EOS>")


def with_last_tokens(texts: Sequence[str], kind: int) -> dict[str, Any]:
    """Return metadata in which `texts` are the last tokens, of this type."""
    tokenizer = byte_level_tokenizer()
    stored = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer) - len(texts))))
    tokens = [f"<other{i}>" if token in texts else token for i, token in enumerate(stored)]
    types = [3 if i in tokenizer.all_special_ids else 1 for i in range(len(tokens))]
    return {
        "tokenizer.ggml.merges": ["d e"],
        "tokenizer.ggml.tokens": [*tokens, *texts],
        "tokenizer.ggml.token_type": [*types, *[kind] * len(texts)],
    }


def ends_of(path: Path) -> set[int]:
    return {*settings(path).tokenizer.generation["eos_token_id"]}


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_marks_end_a_text_whatever_their_type(kind: int, tmp_path: Path) -> None:
    texts = (*ENDS, *FILLS, *NO_ENDS)
    path = save_gguf(tmp_path / "model.gguf", metadata=with_last_tokens(texts, kind))
    tokenizer = read_tokenizer(spec_of(path))
    assert {text for text in texts if tokenizer.convert_tokens_to_ids(text) in ends_of(path)} == {*ENDS, *FILLS}
    assert tokenizer.decode(sorted(ends_of(path)), skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("ids", "ends"),
    [
        ({"eot_token_id": 40, "eom_token_id": 41, "fim_pad_token_id": 42, "fim_sep_token_id": 43}, {40, 41, 42, 43}),
        ({"bos_token_id": 40, "padding_token_id": 41, "mask_token_id": 42, "fim_pre_token_id": 43}, set()),
        ({"eos_token_id": NO_TOKEN}, {11}),
        ({"eos_token_id": None}, {11}),
    ],
)
def test_ids_of_ends(ids: dict[str, Any], ends: set[int], tmp_path: Path) -> None:
    metadata = {f"tokenizer.ggml.{name}": token for name, token in ids.items()}
    path = save_gguf(tmp_path / "model.gguf", metadata=metadata)
    assert ends_of(path) == {0} | ends  # 0: `</s>`, whatever its id
    assert ("token 11 ends" in load(spec_of(path)).engine) == (ends == {11})


MESSAGES = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [MESSAGES, "{{ bos_token }}" + MESSAGES])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_a_text_begins_with_one_bos(add_bos: bool | None, template: str, tmp_path: Path) -> None:
    tokenizer, path = sentencepiece_tokenizer(), tmp_path / "model.gguf"
    changes = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.chat_template": template}
    write_gguf(path, tiny_for_gguf("llama", tokenizer), tokenizer, metadata=changes)
    read = read_tokenizer(spec_of(path))

    def count(text: str, chat: bool = False) -> int:
        return read_prompt(read, text, chat, len(read)).tokens.count(read.bos_token_id)

    adds = add_bos is not False
    assert count("def") == adds and count(f"{tokenizer.bos_token}def") == 1
    assert count("def", chat=True) == (adds or template != MESSAGES)


def test_default_ids_of_sentencepiece(tmp_path: Path) -> None:
    tokenizer, path = sentencepiece_tokenizer(), tmp_path / "model.gguf"
    ids = dict.fromkeys([f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown")])
    write_gguf(path, tiny_for_gguf("llama", tokenizer), tokenizer, metadata=ids)
    read = read_tokenizer(spec_of(path))
    assert [read.bos_token_id, read.eos_token_id, read.unk_token_id] == [1, 2, 0]
    for scores in (None, [0.0] * len(tokenizer)):
        write_gguf(path, tiny_for_gguf("llama", tokenizer), tokenizer, metadata={"tokenizer.ggml.scores": scores})
        assert "no scores, equal" in refusal(settings, path)


def always(token: int) -> dict[str, np.ndarray]:
    """Return tensors of a model that chooses this token after every text: its layers add nothing."""
    vocab = len(byte_level_tokenizer())
    head, embeddings, norm = np.zeros((vocab, 64)), np.zeros((vocab, 64)), np.zeros(64)
    head[token], embeddings[:, 0], norm[0] = 50, 3, 1
    changed = {"output.weight": head, "output_norm.weight": norm, "token_embd.weight": embeddings}
    for layer in range(2):
        changed[f"blk.{layer}.attn_output.weight"] = np.zeros((64, 64))
        changed[f"blk.{layer}.ffn_down.weight"] = np.zeros((64, 128))
    return {name: values.astype(np.float32) for name, values in changed.items()}


TURN = "{% for m in messages %}<|im_start|>{{ m.content }}<|turn_over|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("mark", "stop", "kind", "reason"),
    [
        ("<|im_start|>", ("<|im_start|>",), 1, "stop"),
        ("<|im_start|>", ("<|im_start|><|im_start|>",), 3, "stop"),
        ("<|im_start|>", ("x", "<|im_start|>user"), 4, "length"),
        ("<|im_start|>", (), 3, "length"),
        ("<|im_end|>", (), 1, "stop"),
        ("<|turn_over|>", (), 4, "stop"),
    ],
)
def test_marks_end_a_run_and_are_not_shown(
    mark: str, stop: tuple[str, ...], kind: int, reason: str, tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer()
    last, path = len(tokenizer) - 1, tmp_path / "model.gguf"
    metadata = {**with_last_tokens([mark], kind), "tokenizer.chat_template": TURN}
    model = tiny_for_gguf("llama", tokenizer, tie_word_embeddings=False)
    write_gguf(path, model, tokenizer, metadata=metadata, tensors=always(last))
    recipe = Recipe(target=str(path), method="ar", temperature=0, max_tokens=4, stop_texts=stop, device="cpu")
    events = list(generate(recipe, "def", load_pair(str(path), device="cpu")))
    steps = [event for event in events if isinstance(event, StepEvent)]
    text = "".join(piece for event in steps for piece in event.pieces)
    assert isinstance(events[-1], End) and events[-1].reason == reason
    if reason == "stop":
        assert text == "" and {token for event in steps for token in event.step.tokens} == {last}
    else:
        assert text == ("" if kind == 3 else mark * 4)
    assert next(event for event in events if isinstance(event, Header)).prompt == "def"


# --- headers ---


def test_headers_are_read_as_written_by_llama_cpp(tmp_path: Path) -> None:
    """Largest or smallest value of each type, and tensors in blocks."""
    writer, path = GGUFWriter(tmp_path / "model.gguf", "llama"), tmp_path / "model.gguf"
    values: dict[str, Any] = {"float32": 0.5, "float64": 0.1, "bool": True, "string": "naïve", "array": [1, -2]}
    for bits in (8, 16, 32, 64):
        values |= {f"uint{bits}": (1 << bits) - 1, f"int{bits}": -1 << bits - 1}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    tensors = {"a": ((2, 3), "F32"), "b": ((3, 64), "Q8_0"), "c": ((1, 256), "Q4_K"), "d": ((5,), "F16")}
    for name, (shape, kind) in tensors.items():
        data = np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)
        qtype = GGMLQuantizationType[kind]
        writer.add_tensor(name, quantize(data, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, oracle = read_gguf_header("model", path), {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert file.metadata == {"general.architecture": "llama", **values}
    for name, tensor in file.tensors.items():
        assert tensor.shape == tensors[name][0]
        assert (tensor.start, tensor.nbytes) == (oracle[name].data_offset, oracle[name].n_bytes)


TOKENIZER = byte_level_tokenizer()
KEYS = [*described(tiny_for_gguf("llama", TOKENIZER).config), *vocabulary(TOKENIZER, "gpt-2")]
KEYS += ["{arch}.rope.scaling.type", "{arch}.rope.scaling.factor", "{arch}.vocab_size", "tokenizer.ggml.added_tokens"]
NUMBERS = st.integers(0, NO_TOKEN) | st.integers(-9, 300) | st.floats(width=32)
LISTS = st.lists(st.integers(0, 300), min_size=1, max_size=4) | st.lists(st.text(max_size=3), min_size=1, max_size=4)
CHANGED = st.none() | NUMBERS | st.booleans() | st.text(max_size=5) | LISTS


@holds_for(12, changes=st.dictionaries(st.sampled_from(KEYS), CHANGED, min_size=1, max_size=2))
def test_changed_metadata_give_a_model_or_a_sentence(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save_gguf(Path(folder) / "model.gguf", metadata=changes)
        refusal(lambda: read_tokenizer(spec_of(path)).encode("def f(x):"))
        refusal(load, spec_of(path))


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return save_gguf(tmp_path_factory.mktemp("valid") / "model.gguf").read_bytes()


@holds_for(60, damage=st.dictionaries(st.integers(0, 12_000), st.sampled_from((0, 1, 255)) | st.integers(0, 255)))
def test_damaged_headers_give_a_tokenizer_or_a_sentence(valid: bytes, damage: dict[int, int]) -> None:
    content = bytearray(valid)
    for position, value in damage.items():
        content[position] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content)
        refusal(read_tokenizer, spec_of(path))


SECONDS, GROWTH = 20, 300_000_000
STRING, LIST = 8, 9  # numbers of types
HUGE = 1 << 63


def header(body: bytes, tensors: int, entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + body


def list_entry(value: bytes) -> bytes:
    """Encode a list of the key "a"."""
    return struct.pack("<QsI", 1, b"a", LIST) + value


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def metadata(prefix: str, **values: Any) -> Callable[[Path], object]:
    """Write a valid model with other metadata; `__` is a dot."""
    return lambda path: save_gguf(path, metadata={prefix + key.replace("__", "."): v for key, v in values.items()})


def sparse_texts(path: Path) -> None:
    """Announce texts in a terabyte of zeros."""
    path.write_bytes(header(list_entry(struct.pack("<IQ", STRING, 50_000)), 0, 1))
    os.truncate(path, 1 << 40)


LARGE_TENSOR = struct.pack("<QsIQQIQ", 1, b"a", 2, HUGE, HUGE, 0, 0)
DEEP_LIST = list_entry(struct.pack("<IQ", LIST, 1) * 100_000)
PIECES_OF_MEGABYTES = [f"w{i}" * 15_000 for i in range(300)]
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {  # files with a part of their refusals
    "another format": (content(b"PK\3\4" + bytes(100)), "does not begin with GGUF"),
    "big-endian": (content(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(99)), "big-endian"),
    "many tensors": (content(header(bytes(99), HUGE, 0)), "0 dimensions|occurs twice|truncated"),
    "many texts": (sparse_texts, "general.architecture is missing"),
    "deep lists": (content(header(DEEP_LIST, 0, 1)), "contains lists"),
    "size 2^63": (content(header(LARGE_TENSOR + bytes(99), 1, 0)), "beyond the end"),
    "a billion layers": (
        metadata("{arch}.", block_count=10**9),
        "num_hidden_layers is 1000000000, not a number from 1 to",
    ),
    "large heads": (
        metadata("{arch}.attention.", key_length=65_536, value_length=65_536),
        "head_dim is 65536, not a number from 1 to",
    ),
    "repeated token": (metadata("tokenizer.ggml.", tokens=["a"] * 300), "a token occurs twice"),
    "endless pieces": (
        metadata("tokenizer.ggml.", model="llama", scores=[0.0] * 300, tokens=PIECES_OF_MEGABYTES),
        "too long",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_sentence(name: str, tmp_path: Path) -> None:
    write, part = HOSTILE[name]
    write(tmp_path / "model.gguf")
    spec = spec_of(tmp_path / "model.gguf")
    start, memory = time.monotonic(), peak_process_bytes()
    refusals = [refusal(plan_spec, spec, 64), refusal(load, spec), refusal(read_tokenizer, spec)]
    assert re.search(part, refusals[1])
    assert time.monotonic() - start < SECONDS and peak_process_bytes() - memory < GROWTH


def test_special_files_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "is not a file" in refusal(load, ModelSpec(str(tmp_path / "pipe.gguf"), device="cpu"))
    assert "without config.json" in refusal(load, ModelSpec(str(tmp_path / "folder.gguf"), device="cpu"))
