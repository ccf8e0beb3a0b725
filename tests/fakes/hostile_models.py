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
from transformers import MarianConfig, SwitchTransformersConfig

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
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 64}

CONFIGURATIONS = {
    "size as NaN": HostileModel(config(hidden_size=float("nan")), "NaN is not a number"),
    "size of 5,000 digits": HostileModel(
        lambda f: written("config.json", '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}")(f), "valid JSON"
    ),
    "more layers than weights": HostileModel(config(num_hidden_layers=3), "missing: model.layers.2."),
    "indivisible groups": HostileModel(config(num_key_value_heads=3), "3 keys and values"),
    "attention from the hub": HostileModel(config(attn_implementation="evil/kernel"), "evil/kernel"),
    "deeply nested configuration": HostileModel(written("config.json", DEEP), "nested too deeply"),
    "repeated keys": HostileModel(written("config.json", '{"vocab_size": 1, "vocab_size": 2}'), "occurs twice"),
    "huge configuration": HostileModel(sparse("config.json", 1 << 33), "config.json of"),
    "many values": HostileModel(config(extra=[0] * 300_000), "more than 200,000 values"),
    "many experts": HostileModel(
        other_architecture(SwitchTransformersConfig(num_layers=1000, num_experts=4000)), "4,000 experts"
    ),
    "table of positions": HostileModel(
        other_architecture(MarianConfig(max_position_embeddings=1 << 24)), "table of 16,777,216 positions"
    ),
    "code": HostileModel(with_code),
    "link to the configuration": HostileModel(linked("config.json"), "link out of the directory"),
    "special configuration": HostileModel(special("config.json"), "not a regular file"),
}
GENERATION = {
    "NaN temperature": HostileModel(
        written("generation_config.json", '{"temperature": NaN, "top_k": NaN}'), "NaN is not a number"
    ),
    "end as object": HostileModel(written("generation_config.json", '{"eos_token_id": {"a": 1}}'), "eos_token_id"),
}
TOKENIZERS = {
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
    "exponential pattern": HostileModel(pattern(r"(a+)+$"), "backtracks too much"),
    "cubic pattern": HostileModel(pattern(r"\s*\s*\s*x"), "backtracks too much"),
    "hostile normalizer": HostileModel(
        rules(normalizer={"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": ""}), "backtracks too much"
    ),
    "growing text": HostileModel(rules(normalizer=replaced(30, "aa")), "multiply"),
    "repeated text": HostileModel(
        rules(post_processor={"type": "Sequence", "processors": [TEMPLATE] * 20}), "multiply"
    ),
    "huge tokenizer": HostileModel(sparse("tokenizer.json", 1 << 33), "tokenizer.json of"),
    "many lists": HostileModel(written("tokenizer.json", '{"a": [' + "[]," * 4_100_000 + "0]}"), "too many values"),
    "padding": HostileModel(rules(padding=PADDING)),
    "file of the system": HostileModel(edited("tokenizer_config.json", vocab_file="/etc/passwd")),
    "link to templates": HostileModel(
        lambda f: (f / "additional_chat_templates").symlink_to("/etc"), "link out of the directory"
    ),
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
    "absurd header length": HostileModel(header(lambda entries: None, 1 << 62), "absurd header"),
    "overlapping tensors": HostileModel(
        header(lambda entries: entries[HEAD].update(data_offsets=entries[EMBEDDING]["data_offsets"])), "damaged"
    ),
    "overflowing shape": HostileModel(
        header(lambda entries: entries[HEAD].update(shape=[1 << 40, 1 << 40])), "damaged"
    ),
    "link to the weights": HostileModel(linked("model.safetensors"), "link out of the directory"),
    "index outside": HostileModel(index({HEAD: "../../secret.safetensors"}), "secret.safetensors"),
}
HOSTILE = CONFIGURATIONS | GENERATION | TOKENIZERS | WEIGHTS
