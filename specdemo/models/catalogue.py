"""Models that ready pairs are made of, as data: where they are, under which licence, how large.

`tests/test_catalogue.py` builds each from its shape and counts its weights; docs/models.md says where facts are from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """A model on the hub. `shape`: what its configuration says, in `transformers`' names."""

    name: str
    revision: str  # a commit: what is loaded next year is what was tried
    licence: str
    parameters: int
    stored: int  # bytes of a weight in its files
    kind: str  # model_type
    shape: dict[str, Any]
    chat: bool = False  # whether its tokenizer brings a chat template
    gated: bool = False  # whether its licence has to be accepted on the hub first
    untied: int = 0  # weights that its files hold besides: a copy of tied embeddings
    encoder: bool = False  # whether it reads its prompt apart from what it writes

    @property
    def download(self) -> int:
        """Bytes of its weight files, all but their headers."""
        return self.stored * (self.parameters + self.untied)


def _shape(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, context: int, **more: Any
) -> dict:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **more,
    }


def _smol(size: str, revision: str, parameters: int, *shape: int) -> Known:
    tied = _shape(*shape, 49152, 8192, tie_word_embeddings=True)
    return Known(f"HuggingFaceTB/SmolLM2-{size}", revision, "Apache-2.0", parameters, 2, "llama", tied)


def _qwen(name: str, revision: str, parameters: int, shape: dict[str, Any]) -> Known:
    return Known(f"Qwen/{name}", revision, "Apache-2.0", parameters, 2, "qwen2", shape, chat=True)


def _pythia(size: str, revision: str, parameters: int, *shape: int) -> Known:
    layers, hidden, heads, inner = shape
    untied = _shape(layers, hidden, heads, heads, inner, 50304, 2048, tie_word_embeddings=False)
    return Known(f"EleutherAI/pythia-{size}", revision, "Apache-2.0", parameters, 2, "gpt_neox", untied)


def _flan(size: str, revision: str, parameters: int, layers: int, hidden: int, heads: int, inner: int) -> Known:
    shape = {"num_layers": layers, "num_decoder_layers": layers, "d_model": hidden, "num_heads": heads, "d_ff": inner}
    more = {"d_kv": 64, "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return Known(f"google/flan-t5-{size}", revision, "Apache-2.0", parameters, 4, "t5", shape | more, encoder=True)


_QWEN_05 = _shape(24, 896, 14, 2, 4864, 151936, 32768, tie_word_embeddings=True)
_QWEN_15 = _shape(28, 1536, 12, 2, 8960, 151936, 32768, tie_word_embeddings=True)
_QWEN_7 = _shape(28, 3584, 28, 4, 18944, 152064, 32768, tie_word_embeddings=False)

MODELS = {
    model.name: model
    for model in (
        _smol("135M", "93efa2f097d58c2a74874c7e644dbc9b0cee75a2", 134_515_008, 30, 576, 9, 3, 1536),
        _smol("360M", "f8027fd0eaeea54caa13c31d31b9fdc459c38b49", 361_821_120, 32, 960, 15, 5, 2560),
        _smol("1.7B", "effd688a12921b4cc83e3312b6feb579f70f9c71", 1_711_376_384, 24, 2048, 32, 32, 8192),
        _qwen("Qwen2.5-0.5B-Instruct", "7ae557604adf67be50417f59c2c2f167def9a775", 494_032_768, _QWEN_05),
        _qwen("Qwen2.5-1.5B-Instruct", "989aa7980e4cf806f80c7fef2b1adb7bc71aa306", 1_543_714_304, _QWEN_15),
        _qwen("Qwen2.5-7B-Instruct", "a09a35458c702b33eeacc393d103063234e8bc28", 7_615_616_512, _QWEN_7),
        _qwen("Qwen2.5-Coder-0.5B-Instruct", "ea3f2471cf1b1f0db85067f1ef93848e38e88c25", 494_032_768, _QWEN_05),
        _qwen("Qwen2.5-Coder-1.5B-Instruct", "2e1fd397ee46e1388853d2af2c993145b0f1098a", 1_543_714_304, _QWEN_15),
        _qwen("Qwen2.5-Coder-7B-Instruct", "c03e6d358207e414f1eca0bb1891e29f1db0e242", 7_615_616_512, _QWEN_7),
        Known(
            "Qwen/Qwen3-0.6B",
            "c1899de289a04d12100db370d81485cdf75e47ca",
            "Apache-2.0",
            596_049_920,
            2,
            "qwen3",
            _shape(28, 1024, 16, 8, 3072, 151936, 40960, head_dim=128, tie_word_embeddings=True),
            chat=True,
            untied=151936 * 1024,
        ),
        Known(
            "Qwen/Qwen3-8B",
            "b968826d9c46dd6066d109eabc6255188de91218",
            "Apache-2.0",
            8_190_735_360,
            2,
            "qwen3",
            _shape(36, 4096, 32, 8, 12288, 151936, 40960, head_dim=128, tie_word_embeddings=False),
            chat=True,
        ),
        Known(
            "meta-llama/Llama-3.2-1B",
            "4e20de362430cd3b72f300e6b0f18e50e7166e08",
            "Llama 3.2 Community",
            1_235_814_400,
            2,
            "llama",
            _shape(16, 2048, 32, 8, 8192, 128256, 131072, head_dim=64, tie_word_embeddings=True),
            gated=True,
        ),
        Known(
            "meta-llama/Llama-3.1-8B",
            "d04e592bb4f6aa9cfee91e2e20afa771667e1d4b",
            "Llama 3.1 Community",
            8_030_261_248,
            2,
            "llama",
            _shape(32, 4096, 32, 8, 14336, 128256, 131072, tie_word_embeddings=False),
            gated=True,
        ),
        Known(
            "google/gemma-2-2b",
            "c5ebcd40d208330abc697524c919956e692655cf",
            "Gemma",
            2_614_341_888,
            4,
            "gemma2",
            _shape(26, 2304, 8, 4, 9216, 256000, 8192, head_dim=256, sliding_window=4096, tie_word_embeddings=True),
            gated=True,
        ),
        Known(
            "google/gemma-2-9b",
            "33c193028431c2fde6c6e51f29e6f17b60cbfac6",
            "Gemma",
            9_241_705_984,
            4,
            "gemma2",
            _shape(42, 3584, 16, 8, 14336, 256000, 8192, head_dim=256, sliding_window=4096, tie_word_embeddings=True),
            gated=True,
        ),
        _flan("small", "0fc9ddf78a1e988dac52e2dac162b0ede4fd74ab", 76_961_152, 8, 512, 6, 1024),
        _flan("large", "0613663d0d48ea86ba8cb3d7a44f0f65dc596a2a", 783_150_080, 24, 1024, 16, 2816),
        _flan("xl", "7d6315df2c2fb742f0f5b556879d730926ca9001", 2_849_757_184, 24, 2048, 32, 5120),
        _pythia("70m", "a39f36b100fe8a5377810d56c3f4789b9c53ac42", 70_426_624, 6, 512, 8, 2048),
        _pythia("160m", "50f5173d932e8e61f858120bcb800b97af589f46", 162_322_944, 12, 768, 12, 3072),
        _pythia("2.8b", "2a259cdd96a4beb1cdf467512e3904197345f6a9", 2_775_208_960, 32, 2560, 32, 10240),
        Known(
            "openai-community/gpt2",
            "607a30d783dfa663caf39e06633721c8d4cfcd7e",
            "MIT",
            124_439_808,
            4,
            "gpt2",
            {"n_layer": 12, "n_embd": 768, "n_head": 12},
        ),
        Known(
            "openai-community/gpt2-xl",
            "15ea56dee5df4983c59b2538573817e1667135e2",
            "MIT",
            1_557_611_200,
            4,
            "gpt2",
            {"n_layer": 48, "n_embd": 1600, "n_head": 25},
        ),
    )
}
