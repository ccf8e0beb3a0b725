"""Model directories that attack the program or are damaged, made from a valid one.

Each change is applied to a copy of a tiny Llama with untied weights.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import MarianConfig, MixtralConfig, SwitchTransformersConfig

Change = Callable[[Path], object]
MARKER = "executed"


@dataclass(frozen=True)
class HostileModel:
    """`part`: text of the refusal by `load`, empty if the model may load."""

    change: Change
    part: str = ""


def edited(file: str, **values: Any) -> Change:
    """Set keys of a JSON file; `...` deletes a key."""

    def change(folder: Path) -> None:
        stored = json.loads((folder / file).read_text()) | values
        (folder / file).write_text(json.dumps({key: value for key, value in stored.items() if value is not ...}))

    return change


def config(**values: Any) -> Change:
    return edited("config.json", **values)


def written(file: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def linked(file: str) -> Change:
    """Replace a file by a link to a copy outside of the directory."""

    def change(folder: Path) -> None:
        (folder / file).rename(folder.parent / file)
        (folder / file).symlink_to(folder.parent / file)

    return change


def special(file: str) -> Change:
    def change(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return change


def sparse(file: str, size: int) -> Change:
    def change(folder: Path) -> None:
        (folder / file).touch()
        os.truncate(folder / file, size)

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        edit(stored)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})

    return change


def header(edit: Callable[[dict[str, Any]], object], length: int | None = None) -> Change:
    """Edit the header of the weights, keeping their bytes."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + size])
        edit(entries)
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data[8 + size :])

    return change


def rules(**values: Any) -> Change:
    return edited("tokenizer.json", **values)


def pattern(regex: str) -> Change:
    return rules(pre_tokenizer={"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False})


def replaced(count: int, content: str) -> dict[str, Any]:
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return {"type": "Sequence", "normalizers": [rule] * count}


def other_architecture(made: Any) -> Change:
    return lambda folder: made.save_pretrained(folder)


def with_code(folder: Path) -> None:
    """Code in each place where a library might look for some."""
    marker = str(folder / MARKER)
    source = f"open({marker!r}, 'w').close()\nclass Own: pass\n"
    for name in ("modeling_own.py", "configuration_own.py", "tokenization_own.py", "__init__.py", "setup.py"):
        (folder / name).write_text(source)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(source)
    classes = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    config(auto_map=classes)(folder)
    edited("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_own.Own"]})(folder)


def with_code_alone(folder: Path) -> None:
    with_code(folder)
    config(model_type="own", architectures=["Own"])(folder)


def index(listed: object, **more: Any) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        content = {"metadata": {}, "weight_map": listed, **more}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
DEEP = "[" * 200_000 + "]" * 200_000
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
PIECE = [{"Sequence": {"id": "A", "type_id": 0}}]
TEMPLATE = {"type": "TemplateProcessing", "single": PIECE * 4, "pair": PIECE, "special_tokens": {}}
PADDING = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
PADDING |= {"pad_type_id": 0, "pad_token": "x"}
TRUNCATION = {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 64}

CONFIGURATIONS = {
    "negative size": HostileModel(config(hidden_size=-64), "hidden_size is -64"),
    "size as text": HostileModel(config(hidden_size="64"), "hidden_size is '64'"),
    "size as float": HostileModel(config(hidden_size=64.5), "hidden_size is 64.5"),
    "size as NaN": HostileModel(config(hidden_size=float("nan")), "NaN is not a number"),
    "size beyond floats": HostileModel(
        lambda f: written("config.json", (f / "config.json").read_text().replace('"hidden_size": 64', '"a": 1e999'))(f),
        "beyond the range",
    ),
    "absurd size": HostileModel(config(hidden_size=10**18), "hidden_size is 1000000000000000000"),
    "size of 5,000 digits": HostileModel(
        lambda f: written("config.json", '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}")(f), "valid JSON"
    ),
    "size as boolean": HostileModel(config(hidden_size=True), "hidden_size is True"),
    "size as list": HostileModel(config(hidden_size=[64, "x"]), "hidden_size is a list"),
    "no size": HostileModel(config(hidden_size=None), "hidden_size"),
    "a billion layers": HostileModel(config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "negative layers": HostileModel(config(num_hidden_layers=-1), "num_hidden_layers"),
    "no layers": HostileModel(config(num_hidden_layers=0), "num_hidden_layers"),
    "fewer layers than weights": HostileModel(config(num_hidden_layers=1), "unexpected: model.layers.1."),
    "more layers than weights": HostileModel(config(num_hidden_layers=3), "missing: model.layers.2."),
    "no heads": HostileModel(config(num_attention_heads=0), "num_attention_heads is 0"),
    "negative heads": HostileModel(config(num_attention_heads=-4), "num_attention_heads is -4"),
    "indivisible heads": HostileModel(config(num_attention_heads=5, head_dim=...), "5 heads"),
    "indivisible groups": HostileModel(config(num_key_value_heads=3), "3 keys and values"),
    "no groups": HostileModel(config(num_key_value_heads=0), "num_key_value_heads is 0"),
    "odd head": HostileModel(config(head_dim=3), "rotates 3 values of a head, not an even number"),
    "head as text": HostileModel(config(head_dim="16"), "head_dim is '16'"),
    "absurd vocabulary": HostileModel(config(vocab_size=10**12), "vocab_size"),
    "negative vocabulary": HostileModel(config(vocab_size=-1), "vocab_size is -1"),
    "absurd inner size": HostileModel(config(intermediate_size=10**12), "intermediate_size"),
    "no positions": HostileModel(config(max_position_embeddings=0), "max_position_embeddings is 0"),
    "absurd positions": HostileModel(config(max_position_embeddings=10**15), "max_position_embeddings"),
    "unknown activation": HostileModel(config(hidden_act="telepathy"), "telepathy"),
    "activation as list": HostileModel(config(hidden_act=["silu"]), "cannot|unknown"),
    "unknown RoPE": HostileModel(config(rope_parameters=ROPE | {"rope_type": "spiral"}), "spiral"),
    "RoPE as list": HostileModel(config(rope_parameters=[1, 2]), "cannot|unknown"),
    "RoPE base 0": HostileModel(config(rope_parameters=ROPE | {"rope_theta": 0}), "rope_theta is 0"),
    "RoPE base as text": HostileModel(config(rope_parameters=ROPE | {"rope_theta": "x"}), "rope_theta is 'x'"),
    "RoPE factor 0": HostileModel(config(rope_parameters=LLAMA3 | {"factor": 0}), "factor is 0"),
    "RoPE without factor": HostileModel(config(rope_parameters=LLAMA3), "cannot|unknown"),
    "negative epsilon": HostileModel(config(rms_norm_eps=-1.0), "rms_norm_eps is -1.0"),
    "epsilon as text": HostileModel(config(rms_norm_eps="small"), "rms_norm_eps is 'small'"),
    "unknown attention": HostileModel(config(attn_implementation="telepathy", hidden_act="gelu"), "telepathy"),
    "attention from the hub": HostileModel(config(attn_implementation="evil/kernel"), "evil/kernel"),
    "unknown layer types": HostileModel(
        config(layer_types=["telepathy"] * 2, model_type="qwen2", architectures=["Qwen2ForCausalLM"]), "layer_types"
    ),
    "type as list": HostileModel(config(model_type=["llama"]), "model_type"),
    "type as object": HostileModel(config(model_type={"a": 1}), "model_type"),
    "unknown type": HostileModel(config(model_type="own", architectures=["Own"]), "unknown"),
    "no type": HostileModel(config(model_type=..., architectures=["Own"]), "unknown"),
    "nested configuration": HostileModel(config(extra=json.loads("[" * 400 + "]" * 400)), "nested too deeply"),
    "deeply nested configuration": HostileModel(written("config.json", DEEP), "nested too deeply"),
    "configuration as list": HostileModel(written("config.json", "[1, 2]"), "not a JSON object"),
    "truncated configuration": HostileModel(written("config.json", '{"model_type": "lla'), "not valid JSON"),
    "empty configuration": HostileModel(written("config.json", ""), "not valid JSON"),
    "binary configuration": HostileModel(written("config.json", b"\xff\xfe\x00\xd8" * 9), "not valid JSON"),
    "repeated keys": HostileModel(written("config.json", '{"vocab_size": 1, "vocab_size": 2}'), "occurs twice"),
    "huge configuration": HostileModel(sparse("config.json", 1 << 33), "config.json of"),
    "many values": HostileModel(config(extra=[0] * 300_000), "more than 200,000 values"),
    "other weights": HostileModel(config(transformers_weights="../other.safetensors"), "other weights"),
    "unknown quantization": HostileModel(config(quantization_config={"quant_method": "magic"})),
    "quantization as list": HostileModel(config(quantization_config=[1]), "unknown"),
    "unknown dtype": HostileModel(config(dtype="telepathy", hidden_act="gelu"), ""),
    "many experts": HostileModel(
        other_architecture(SwitchTransformersConfig(num_layers=1000, num_experts=4000)), "4,000 experts"
    ),
    "absurd experts": HostileModel(other_architecture(MixtralConfig(num_local_experts=10**7)), "num_local_experts"),
    "table of positions": HostileModel(
        other_architecture(MarianConfig(max_position_embeddings=1 << 24)), "table of 16,777,216 positions"
    ),
    "end of text as word": HostileModel(config(eos_token_id="end"), "eos_token_id is 'end'"),
    "100,000 ends": HostileModel(config(eos_token_id=list(range(100_000))), "eos_token_id is a list"),
    "code": HostileModel(with_code),
    "code alone": HostileModel(with_code_alone, "unknown"),
    "adapter": HostileModel(written("adapter_config.json", '{"base_model_name_or_path": "/"}'), "adapter"),
    "link to the configuration": HostileModel(linked("config.json"), "link out of the directory"),
    "special configuration": HostileModel(special("config.json"), "not a regular file"),
}
GENERATION = {
    "NaN temperature": HostileModel(
        written("generation_config.json", '{"temperature": NaN, "top_k": NaN}'), "NaN is not a number"
    ),
    "repeated ends": HostileModel(
        written("generation_config.json", '{"eos_token_id": 1, "eos_token_id": 2}'), "occurs twice"
    ),
    "generation as list": HostileModel(written("generation_config.json", "[]"), "not a JSON object"),
    "end as object": HostileModel(written("generation_config.json", '{"eos_token_id": {"a": 1}}'), "eos_token_id"),
    "nested generation": HostileModel(written("generation_config.json", DEEP), "nested too deeply"),
    "odd generation": HostileModel(written("generation_config.json", '{"num_beams": "x", "top_p": 9}')),
}
TOKENIZERS = {
    "truncated tokenizer": HostileModel(written("tokenizer.json", '{"version": "1.0", "mod'), "not valid JSON"),
    "empty tokenizer": HostileModel(written("tokenizer.json", "{}"), "tokenizer"),
    "tokenizer as list": HostileModel(written("tokenizer.json", "[]"), "not a JSON object"),
    "tokenizer of numbers": HostileModel(rules(model=7), "tokenizer"),
    "unknown model": HostileModel(rules(model={"type": "Telepathy", "vocab": {}}), "tokenizer"),
    "vocabulary of words": HostileModel(rules(model={"type": "BPE", "vocab": {"a": "b"}, "merges": []}), "tokenizer"),
    "merges of unknown tokens": HostileModel(
        rules(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}), "tokenizer"
    ),
    "many added tokens": HostileModel(rules(added_tokens=[{"id": 0, "content": "a"}] * 100_001), "adds more than"),
    "panic": HostileModel(
        lambda f: rules(
            model=json.loads((f / "tokenizer.json").read_text())["model"] | {"continuing_subword_prefix": "x" * 100}
        )(f),
        "tokenizer",
    ),
    "unknown words": HostileModel(
        rules(model={"type": "WordLevel", "vocab": {"def": 0}, "unk_token": "[UNK]"}, added_tokens=[]), "tokenizer"
    ),
    "no vocabulary": HostileModel(rules(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[])),
    "unknown rule": HostileModel(rules(pre_tokenizer={"type": "Telepathy"}), "tokenizer"),
    "nested rules": HostileModel(rules(decoder=json.loads("[" * 400 + "]" * 400)), "nested too deeply"),
    "exponential pattern": HostileModel(pattern(r"(a+)+$"), "backtracks too much"),
    "alternatives": HostileModel(pattern(r"(?:(?:a|a){22}b)"), "backtracks too much"),
    "cubic pattern": HostileModel(pattern(r"\s*\s*\s*x"), "backtracks too much"),
    "invalid pattern": HostileModel(pattern(r"(((["), "unknown syntax"),
    "hostile normalizer": HostileModel(
        rules(normalizer={"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": ""}), "backtracks too much"
    ),
    "growing text": HostileModel(rules(normalizer=replaced(30, "aa")), "multiply"),
    "growing output": HostileModel(
        rules(decoder={"type": "Sequence", "decoders": replaced(30, "aa")["normalizers"]}), "multiply"
    ),
    "long prefix": HostileModel(rules(normalizer={"type": "Prepend", "prepend": "x" * 10_000}), "adds a long text"),
    "repeated text": HostileModel(
        rules(post_processor={"type": "Sequence", "processors": [TEMPLATE] * 20}), "multiply"
    ),
    "random splits": HostileModel(
        lambda f: rules(model=json.loads((f / "tokenizer.json").read_text())["model"] | {"dropout": 0.5})(f),
        "differently each time",
    ),
    "huge tokenizer": HostileModel(sparse("tokenizer.json", 1 << 33), "tokenizer.json of"),
    "many lists": HostileModel(written("tokenizer.json", '{"a": [' + "[]," * 4_100_000 + "0]}"), "too many values"),
    "padding": HostileModel(rules(padding=PADDING)),
    "truncation": HostileModel(rules(truncation=TRUNCATION)),
    "settings as list": HostileModel(written("tokenizer_config.json", "[]"), "not a JSON object"),
    "unknown class": HostileModel(edited("tokenizer_config.json", tokenizer_class="Telepathy")),
    "class as number": HostileModel(edited("tokenizer_config.json", tokenizer_class=7), "tokenizer"),
    "token as list": HostileModel(edited("tokenizer_config.json", eos_token=[1, {}]), "tokenizer"),
    "template as number": HostileModel(edited("tokenizer_config.json", chat_template=7)),
    "wrong added tokens": HostileModel(
        edited("tokenizer_config.json", added_tokens_decoder={"x": {"content": 1}}), "tokenizer"
    ),
    "file of the system": HostileModel(edited("tokenizer_config.json", vocab_file="/etc/passwd")),
    "positional arguments": HostileModel(edited("tokenizer_config.json", init_inputs=["/etc/passwd"])),
    "link to the tokenizer": HostileModel(linked("tokenizer.json"), "link out of the directory"),
    "link to templates": HostileModel(
        lambda f: (f / "additional_chat_templates").symlink_to("/etc"), "link out of the directory"
    ),
    "special tokenizer": HostileModel(special("tokenizer.json"), "not a regular file"),
}
WEIGHTS = {
    "missing head": HostileModel(tensors(lambda stored: stored.pop(HEAD)), f"missing: {HEAD}"),
    "missing layer": HostileModel(
        tensors(lambda stored: [stored.pop(key) for key in [*stored] if ".layers.1." in key]),
        r"missing: model\.layers\.1\.\S+, model\.layers\.1\.\S+, model\.layers\.1\.\S+ and 6 more",
    ),
    "unexpected tensor": HostileModel(
        tensors(lambda stored: stored.update({"model.extra.weight": torch.zeros(2)})), "unexpected: model.extra.weight"
    ),
    "other shape": HostileModel(
        tensors(lambda stored: stored.update({HEAD: torch.zeros(7, 64)})), f"of other shapes: {HEAD}"
    ),
    "whole numbers": HostileModel(
        tensors(lambda stored: stored.update({HEAD: torch.zeros(300, 64, dtype=torch.int8)})), f"not floats: {HEAD}"
    ),
    "no tensors": HostileModel(tensors(lambda stored: stored.clear()), "missing: "),
    "empty weights": HostileModel(written("model.safetensors", b""), "damaged"),
    "absurd header length": HostileModel(header(lambda entries: None, 1 << 62), "absurd header"),
    "header beyond the end": HostileModel(header(lambda entries: None, 10**7), "absurd header"),
    "broken header": HostileModel(written("model.safetensors", struct.pack("<Q", 8) + b'{"a": [}'), "damaged"),
    "offsets beyond the end": HostileModel(
        header(lambda entries: entries[HEAD].update(data_offsets=[0, 1 << 60])), "damaged"
    ),
    "negative offsets": HostileModel(header(lambda entries: entries[HEAD].update(data_offsets=[-8, 0])), "damaged"),
    "overlapping tensors": HostileModel(
        header(lambda entries: entries[HEAD].update(data_offsets=entries[EMBEDDING]["data_offsets"])), "damaged"
    ),
    "overflowing shape": HostileModel(
        header(lambda entries: entries[HEAD].update(shape=[1 << 40, 1 << 40])), "damaged"
    ),
    "unknown dtype of a tensor": HostileModel(header(lambda entries: entries[HEAD].update(dtype="X64")), "damaged"),
    "link to the weights": HostileModel(linked("model.safetensors"), "link out of the directory"),
    "special weights": HostileModel(special("model.safetensors"), "not a regular file"),
    "index outside": HostileModel(index({HEAD: "../../secret.safetensors"}), "secret.safetensors"),
    "index of numbers": HostileModel(index({HEAD: 7}), "lists no files"),
    "index as list": HostileModel(index([1]), "lists no files"),
    "index without files": HostileModel(index({HEAD: "model-00002-of-00009.safetensors"}), "lists 'model-00002"),
}
HOSTILE = CONFIGURATIONS | GENERATION | TOKENIZERS | WEIGHTS
