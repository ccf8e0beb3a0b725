"""Write a tiny target and drafter to disk: random weights from numpy (stable across versions)."""

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NOISE = 0.1  # relative distance of the drafter's weights from the target's
SCALES = {"embed_tokens": 1.0, "lm_head": 0.05}  # standard deviations of weights; of layers:
LAYER_SCALE = 0.3
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
FREQUENT, FREQUENT_SCALE = "abcdefgh é", 10.0  # texts consist mostly of the bytes of these characters


def save_pair(folder: Path) -> tuple[str, str]:
    """Save both models below `folder` and return their directories, target first."""
    tokenizer = _bytes_tokenizer()
    paths = str(folder / "target"), str(folder / "drafter")
    for path, noise in zip(paths, (0.0, NOISE), strict=True):
        _model(len(tokenizer), noise, tokenizer.encode(FREQUENT)).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return paths


def _bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with one token per byte, plus an end token."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE)


def _model(vocab_size: int, noise: float, frequent: list[int]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=vocab_size - 1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    base, extra = np.random.RandomState(0), np.random.RandomState(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim < 2:
                parameter.fill_(1.0)  # norms
                continue
            scale = next((scale for part, scale in SCALES.items() if part in name), LAYER_SCALE)
            values = base.standard_normal(parameter.shape) + noise * extra.standard_normal(parameter.shape)
            parameter.copy_(torch.from_numpy(scale * values))
        model.lm_head.weight[frequent] *= FREQUENT_SCALE
    return model
