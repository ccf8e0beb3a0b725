"""Keys of GGUF files in their current, legacy and absent forms: the model of llama.cpp, or a sentence.

The tables contain facts of llama.cpp (src/llama-model.cpp, src/llama-vocab.cpp, src/llama-context.cpp).
"""

from __future__ import annotations

import json
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
from specdemo.models.gguf_settings import settings_folder
from specdemo.models.load import load, read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

NO_TOKEN = (1 << 32) - 1
SAME, REFUSED = "same", "refused"
SCALE, LEGACY = "rope.scaling.factor", "rope.scale_linear"
TYPE, WINDOW = "rope.scaling.type", "attention.sliding_window"
FORMS: list[tuple[dict[str, Any], str | float]] = [  # a number is the factor of linear scaling
    *[({TYPE: kind}, SAME) for kind in ("none", "linear", "yarn")],
    *[({TYPE: kind, SCALE: factor}, SAME) for kind in ("none", "linear", "yarn") for factor in (0.0, 1.0)],
    *[({SCALE: factor}, SAME) for factor in (0.0, 1.0)],
    *[({LEGACY: factor}, SAME) for factor in (0.0, 1.0)],
    ({SCALE: 4.0}, 4.0),
    ({LEGACY: 4.0}, 4.0),
    ({TYPE: "linear", SCALE: 4.0}, 4.0),
    ({TYPE: "linear", LEGACY: 4.0}, 4.0),
    ({SCALE: 2.0, LEGACY: 4.0}, 2.0),
    ({SCALE: 0.0, LEGACY: 4.0}, SAME),
    ({TYPE: "none", SCALE: 4.0}, SAME),
    ({TYPE: "none", LEGACY: 4.0}, SAME),
    *[({TYPE: kind, SCALE: 4.0}, REFUSED) for kind in ("yarn", "longrope", "dynamic")],
    *[({TYPE: kind}, REFUSED) for kind in ("longrope", "su", "Linear", 1)],
    ({TYPE: "yarn", LEGACY: 4.0}, REFUSED),
    *[({SCALE: factor}, REFUSED) for factor in (-2.0, float("nan"), "4", [4.0])],
    ({"rope.scaling.attn_factor": 1.0}, SAME),
    ({"rope.scaling.attn_factor": 1.2}, REFUSED),
    ({"rope.scaling.attn_factor": 0.0}, REFUSED),
    ({"rope.scaling.original_context_length": 64, "rope.scaling.finetuned": True}, SAME),
    ({"rope.freq_base": None}, SAME),
    *[({"rope.freq_base": base}, REFUSED) for base in (0.0, -1.0, "10000")],
    ({"rope.dimension_count": None}, SAME),
    ({"rope.dimension_count": 16}, SAME),
    ({"rope.dimension_count": 8}, REFUSED),
    ({"attention.causal": True}, SAME),
    *[({"attention.causal": value}, REFUSED) for value in (False, 0, "no", [True, False])],
    *[
        ({f"{name}": form}, SAME if equal else REFUSED)
        for name, count in (
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("feed_forward_length", 128),
        )
        for form, equal in (
            ([count, count], True),
            ([count, 2 * count], False),
            ([count], False),
            ([count] * 3, False),
            (float(count), False),
            (str(count), False),
        )
    ],
    ({"attention.key_length": None, "attention.value_length": None}, SAME),
    ({"attention.value_length": None}, SAME),
    ({"attention.key_length": 32}, REFUSED),
    ({"attention.value_length": 32}, REFUSED),
    *[
        ({name: None}, REFUSED)
        for name in (
            *("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"),
            "attention.layer_norm_rms_epsilon",
        )
    ],
    *[
        ({name: value}, SAME if value == 0 else REFUSED)
        for name in (
            *("expert_count", "expert_used_count", "expert_group_count", "nextn_predict_layers"),
            *("attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv", "attention.max_alibi_bias"),
        )
        for value in (0, 2, [0, 0], [0, 2])
        if value != [0, 0] or name == "expert_used_count"
    ],
    *[
        ({name: value}, SAME if value in (0.0, 1.0) else REFUSED)
        for name in ("logit_scale", "embedding_scale", "residual_scale")
        for value in (0.0, 1.0, 0.5, 12.0, float("nan"))
    ],
    *[({"attention.scale": value}, SAME) for value in (0.0, 0.25)],
    ({"attention.scale": 0.3}, REFUSED),
    *[({WINDOW: value}, SAME) for value in (0, 256, 4096)],
    *[({WINDOW: value}, REFUSED) for value in (8, 255)],
    ({"vocab_size": 7, "pooling_type": 3, "tensor_data_layout": "Meta AI original pth"}, SAME),
]
FORMS = [(changes, SAME if changes == {"expert_used_count": [0, 0]} else result) for changes, result in FORMS]


def settings(path: Path, name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((settings_folder(str(path), path) / name).read_text())
    return content


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
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 dbrx smaug-bpe glm4 chatglm-bpe": (
        "123 456 7 Ġit 's Ġa .b Ġ 12"
    ),
    "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan": "1 2 3 4 5 6 7 Ġit 's Ġa .b Ġ 1 2",
    "starcoder refact command-r smollm codeshell exaone": "1 2 3 4 5 6 7 Ġit 's Ġa . b Ġ 1 2",
    "gpt-2 phi-2 mpt olmo jais trillion exaone4 a.x-4.0": "1234567 Ġit 's Ġa . b Ġ12",
    "tekken": "1 2 3 4 5 6 7 Ġit 's Ġa .b Ġ 1 2",
    "gpt-4o llama4": "123 456 7 Ġit's Ġa .b Ġ 12",
    "deepseek-coder": "1 2 3 4 5 6 7 Ġit ' s Ġa . b Ġ 1 2",
}
NAMES = [(name, pieces) for names, pieces in PIECES.items() for name in names.split()]


@pytest.mark.parametrize(("pre", "pieces"), [*NAMES, (None, PIECES["default"])])
def test_names_of_rules(pre: str | None, pieces: str, tmp_path: Path) -> None:
    path = changed(tmp_path / "model.gguf", {"tokenizer.ggml.pre": pre})
    splits = read_tokenizer(spec_of(path)).backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert " ".join(piece for piece, _ in splits) == pieces
    assert ("default rule" in load(spec_of(path)).engine) == (not pre)


ENDS = (
    *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "[e~[", "<|eot_id|>", "<|eom_id|>", "<|im_end|>"),
    *("<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>"),
    *("<|fim_pad|>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<reponame>", "<|file_sep|>"),
)
NO_ENDS = ("<|im_start|>", "<|user|>", "<|fim_prefix|>", "<fim_suffix>", "<|message|>", "<unused1>", "<EOS>")


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
@pytest.mark.parametrize("text", [*ENDS, *NO_ENDS])
def test_marks_end_a_text_whatever_their_type(text: str, kind: int, tmp_path: Path) -> None:
    path = changed(tmp_path / "model.gguf", replaced([text], kind))
    last = len(byte_level_tokenizer()) - 1
    assert (last in settings(path, "generation_config.json")["eos_token_id"]) == (text in ENDS)
    if text in ENDS:
        assert read_tokenizer(spec_of(path)).decode([last], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("texts", "removed"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], "<|end|>"),
        (["<|end|>", "<|calls|>", "<|flush|>"], "<|end|>"),
        (["<|end|>", "<|return|>"], ""),
        (["</s>", "<|tool_response>"], "</s>"),
    ],
)
def test_marks_within_an_answer(texts: list[str], removed: str, tmp_path: Path) -> None:
    ends = settings(changed(tmp_path / "model.gguf", replaced(texts, 3)), "generation_config.json")["eos_token_id"]
    first = len(byte_level_tokenizer()) - len(texts)
    assert [text for i, text in enumerate(texts, first) if i not in ends] == ([removed] if removed else [])


IDS = [
    *[({f"{name}_token_id": 40}, {40}) for name in ("eot", "eom", "fim_pad", "fim_rep", "fim_sep", "eos")],
    *[({f"{name}_token_id": 40}, set()) for name in ("bos", "padding", "seperator", "mask", "fim_pre", "prefix")],
    ({"eos_token_id": NO_TOKEN}, {11}),
    ({"eos_token_id": None}, {11}),
]


@pytest.mark.parametrize(("ids", "ends"), IDS)
def test_ids_of_ends(ids: dict[str, Any], ends: set[int], tmp_path: Path) -> None:
    path = changed(tmp_path / "model.gguf", {f"tokenizer.ggml.{name}": token for name, token in ids.items()})
    base = set(settings(changed(tmp_path / "base.gguf", {}), "generation_config.json")["eos_token_id"])
    assert base == {0}  # `</s>`, with and without an id
    assert set(settings(path, "generation_config.json")["eos_token_id"]) == base | ends
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
    """Head that chooses this token after every text."""
    tokenizer = byte_level_tokenizer()
    model = tiny_for_gguf("llama", tokenizer, tie_word_embeddings=False)
    head, embeddings = np.zeros((len(tokenizer), 64), np.float32), model.model.embed_tokens.weight.numpy()
    head[token] = 50
    norm = np.zeros(64, np.float32)
    norm[0] = 1
    outputs = {f"blk.{i}.{part}.weight": 0 for i in range(2) for part in ("attn_output", "ffn_down")}
    state = {
        name: np.zeros_like(model.state_dict()[STATE[name.split(".", 2)[2]].format(name.split(".")[1])].numpy())
        for name in outputs
    }
    shifted = embeddings.copy()
    shifted[:, 0] = 3
    return {"output.weight": head, "output_norm.weight": norm, "token_embd.weight": shifted, **state}


STATE = {
    "attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}
TURN = "{% for m in messages %}<|im_start|>{{ m.content }}<|turn_over|>\n{% endfor %}"


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize(
    ("mark", "stop", "reason"),
    [
        ("<|im_start|>", ("<|im_start|>",), "stop"),
        ("<|im_start|>", ("<|im_start|><|im_start|>",), "stop"),
        ("<|im_start|>", ("x", "<|im_start|>user"), "length"),
        ("<|im_start|>", (), "length"),
        ("<|im_end|>", (), "stop"),
        ("<|turn_over|>", (), "stop"),
    ],
)
def test_marks_end_a_run_and_are_not_shown(
    mark: str, stop: tuple[str, ...], reason: str, kind: int, tmp_path: Path
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
