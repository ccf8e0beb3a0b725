"""Keys of GGUF files in their current, legacy and absent forms: the model of llama.cpp, or a sentence.

The tables contain facts of llama.cpp (src/llama-model.cpp, src/llama-vocab.cpp, src/llama-context.cpp).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.gguf_models import save_gguf, tiny_for_gguf, write_gguf
from fakes.tiny_models import byte_level_tokenizer, sentencepiece_tokenizer

from specdemo.core.errors import UserError
from specdemo.core.events import End, Header, StepEvent
from specdemo.generate import generate
from specdemo.loaded_pair import load_pair
from specdemo.models.chat_prompt import read_prompt
from specdemo.models.gguf_settings import gguf_settings
from specdemo.models.load import load, read_tokenizer
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


def settings(path: Path) -> Mapping[str, Any]:
    return gguf_settings(str(path), path).config


def ends_of(path: Path) -> list[int]:
    ends: list[int] = gguf_settings(str(path), path).tokenizer.generation["eos_token_id"]
    return ends


def spec_of(path: Path) -> ModelSpec:
    return ModelSpec(str(path), "float32", device="cpu")


def changed(path: Path, changes: dict[str, Any], **options: Any) -> Path:
    return save_gguf(path, metadata=changes, **options)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_sizes_and_rotation_are_those_of_llama_cpp(architecture: str, tmp_path: Path) -> None:
    base = settings(changed(tmp_path / "base.gguf", {}, architecture=architecture))
    for i, (changes, result) in enumerate(FORMS):
        keys = {f"{{arch}}.{name}": value for name, value in changes.items()}
        path = changed(tmp_path / f"{i}.gguf", keys, architecture=architecture)
        if result == REFUSED:
            with pytest.raises(UserError, match="choose"):
                load(spec_of(path))
                pytest.fail(f"{changes} is read")
            continue
        expected = dict(base)
        if result != SAME:
            expected["rope_parameters"] = {**base["rope_parameters"], "rope_type": "linear", "factor": result}
        assert settings(path) == expected, changes


def test_a_missing_count_of_keys_is_that_of_queries(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_for_gguf("llama", tokenizer, num_key_value_heads=4)
    write_gguf(tmp_path / "model.gguf", model, tokenizer, metadata={"{arch}.attention.head_count_kv": None})
    assert settings(tmp_path / "model.gguf")["num_key_value_heads"] == 4


def test_other_contents_are_named(tmp_path: Path) -> None:
    factors = np.ones(8, np.float32)
    for kind, options, words in (
        ("llama", {"metadata": {"general.type": "adapter"}}, "no model, but 'adapter'"),
        ("llama", {"metadata": {"split.count": 3}}, "is a part of a model: join the parts"),
        ("qwen2", {"tensors": {"rope_freqs.weight": factors}}, "sets rope_freqs.weight"),
        ("llama", {"metadata": {"tokenizer.ggml.suppress_tokens": [1, 2]}}, "forbids 2 tokens"),
        ("llama", {"metadata": {"tokenizer.ggml.model": "none"}}, "tokenizer 'none' is unknown"),
    ):
        with pytest.raises(UserError, match=words):
            settings(save_gguf(tmp_path / "model.gguf", kind, **options))
    tokenizer = byte_level_tokenizer()
    model = tiny_for_gguf("llama", tokenizer)
    names = [f"blk.{layer}.{part}.weight" for layer in range(2) for part in PARTS]
    removed = dict.fromkeys([*names, "token_embd.weight", "output_norm.weight", "output.weight"])
    write_gguf(tmp_path / "vocabulary.gguf", model, tokenizer, tensors=removed)
    with pytest.raises(UserError, match="contains a vocabulary only"):
        settings(tmp_path / "vocabulary.gguf")


PARTS = (*("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),)
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
        path = changed(tmp_path / f"{pre}.gguf", {"tokenizer.ggml.pre": pre})
        splits = read_tokenizer(spec_of(path)).backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
        assert " ".join(piece for piece, _ in splits) == pieces, pre
    assert "default rule" in load(spec_of(path)).engine


ENDS = ("</s>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "<｜end▁of▁sentence｜>")
FILLS = ("<|fim_pad|>", "[PAD]", "<|repo_name|>", "<|file_sep|>")  # end a text of code
NO_ENDS = ("<|im_start|>", "<|user|>", "<|fim_prefix|>", "<fim_suffix>", "<|message|>", "<EOS>")


def replaced(texts: list[str], kind: int, **others: Any) -> dict[str, Any]:
    """Metadata in which `texts` are the last tokens, of this type."""
    tokenizer = byte_level_tokenizer()
    stored = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    tokens = [f"<other{i}>" if token in texts else token for i, token in enumerate(stored)]
    count = len(tokens) - len(texts)
    types = [3 if i in tokenizer.all_special_ids else 1 for i in range(count)] + [kind] * len(texts)
    merges = {"tokenizer.ggml.merges": ["d e"]}
    lists = {"tokenizer.ggml.tokens": [*tokens[:count], *texts], "tokenizer.ggml.token_type": types}
    return {**merges, **lists, **{f"tokenizer.ggml.{name}": value for name, value in others.items()}}


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_marks_end_a_text_whatever_their_type(kind: int, tmp_path: Path) -> None:
    last = len(byte_level_tokenizer()) - 1
    for i, text in enumerate((*ENDS, *FILLS, *NO_ENDS)):
        path, ends = changed(tmp_path / f"{i}.gguf", replaced([text], kind)), text not in NO_ENDS
        assert (last in ends_of(path)) == ends, text
        if ends:
            assert read_tokenizer(spec_of(path)).decode([last], skip_special_tokens=True) == ""


IDS: list[tuple[dict[str, Any], set[int]]] = [
    ({"eot_token_id": 40, "eom_token_id": 41, "fim_pad_token_id": 42, "fim_sep_token_id": 43}, {40, 41, 42, 43}),
    ({"bos_token_id": 40, "padding_token_id": 41, "mask_token_id": 42, "fim_pre_token_id": 43}, set()),
    ({"eos_token_id": NO_TOKEN}, {11}),
    ({"eos_token_id": None}, {11}),
]


@pytest.mark.parametrize(("ids", "ends"), IDS)
def test_ids_of_ends(ids: dict[str, Any], ends: set[int], tmp_path: Path) -> None:
    path = changed(tmp_path / "model.gguf", {f"tokenizer.ggml.{name}": token for name, token in ids.items()})
    assert set(ends_of(path)) == {0} | ends  # 0: `</s>`, whatever its id
    assert ("token 11 ends" in load(spec_of(path)).engine) == (ends == {11})


WRITES = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
SILENT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [WRITES, SILENT])
@pytest.mark.parametrize(
    ("add_bos", "raw", "typed", "chat"),
    [(None, 1, 1, (1, 1)), (True, 1, 1, (1, 1)), (False, 0, 1, (1, 0))],
)
def test_a_text_begins_with_one_bos(
    add_bos: bool | None, raw: int, typed: int, chat: tuple[int, int], template: str, tmp_path: Path
) -> None:
    tokenizer = sentencepiece_tokenizer()
    bos = tokenizer.bos_token
    changes = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.chat_template": template}
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_for_gguf("llama", tokenizer), tokenizer, metadata=changes)
    read = read_tokenizer(spec_of(path))

    def count(text: str, chat: bool = False) -> int:
        return read_prompt(read, text, chat, len(read)).tokens.count(read.bos_token_id)

    assert (count("def"), count(f"{bos}def")) == (raw, typed)
    assert count("def", chat=True) == chat[template == SILENT]


def test_default_ids_of_sentencepiece(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    path = tmp_path / "model.gguf"
    ids = dict.fromkeys([f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown")])
    write_gguf(path, tiny_for_gguf("llama", tokenizer), tokenizer, metadata=ids)
    read = read_tokenizer(spec_of(path))
    assert [read.bos_token_id, read.eos_token_id, read.unk_token_id] == [1, 2, 0]
    for scores in (None, [0.0] * len(tokenizer)):
        write_gguf(path, tiny_for_gguf("llama", tokenizer), tokenizer, metadata={"tokenizer.ggml.scores": scores})
        with pytest.raises(UserError, match="no scores, equal"):
            settings(path)


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
    metadata = {**replaced([mark], kind), "tokenizer.chat_template": TURN}
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
