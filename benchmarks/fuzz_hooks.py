"""Schemathesis hooks of `fuzz.py` that make part of the generated requests pass validation.

Generated token ids are rarely within the vocabulary and lengths rarely agree. Every second valid body is corrected in
these respects, so that contexts, draft forests, rows and rules are tested too. Runs in the environment of Schemathesis;
imports no part of this program.
"""

from __future__ import annotations

import base64
import os
from itertools import count
from typing import Any

import msgpack
import schemathesis
from schemathesis.generation import GenerationMode

VOCABULARY = int(os.environ["SPECDEMO_VOCABULARY"])
RULES = ("rejection", "block", "match", "coupled", "top1", "ratio", "threshold", "typical")
FLAT = base64.b64encode(b"\x00\x00\x80\x3f" * VOCABULARY).decode()  # row of 1.0, little-endian float32
MAX_TOKENS = 64  # of a text, for many requests per second
turns = count()


def _ids(values: list[int]) -> list[int]:
    return [value % VOCABULARY for value in values[:MAX_TOKENS]]


def _correct_draft(body: dict[str, Any], turn: int) -> None:
    """Make lengths agree and rows valid, share a few contexts, and open three of four of them."""
    n = body["k"] = len(body.get("draft_tokens", ()))
    for name, filler in (("q_token_probs", 0.5), ("hard_mask", 1), ("parents", -1)):
        if body.get(name) is not None:
            body[name] = [*body[name], *[filler] * n][:n]
    if body.get("parents") is not None:
        body["parents"] = [min(parent, node - 1) for node, parent in enumerate(body["parents"])]
    if body.get("rows") is not None:
        body["rows"] = [{"node": i, "type": "f4", "values": FLAT} for i in range(min(n, len(body["rows"])))]
    body.update(ctx_id=f"fuzz-{turn % 5}", round=body["round"] % 8, epoch=turn // 8)
    if turn % 4:
        body.update(base=0, sampling_cfg=body.get("sampling_cfg") or {})
        body["tokens"] = body.get("tokens") or [turn % VOCABULARY]


@schemathesis.serializer("application/msgpack")
def packed(context: Any, value: Any) -> bytes:
    """Encode as msgpack; return an empty body for values that msgpack cannot represent."""
    try:
        return msgpack.packb(value)
    except (OverflowError, TypeError, ValueError):
        return b""


@schemathesis.deserializer("application/msgpack")
def unpacked(context: Any, response: Any) -> Any:
    """Decode msgpack; probabilities are an extension type of four bytes each."""
    return msgpack.unpackb(response.content, ext_hook=lambda kind, data: list(memoryview(data).cast("f")))


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Correct every second valid body; invalid bodies are unchanged."""
    turn = next(turns)
    if turn % 2 or case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    if not isinstance(case.body, dict):
        return
    body = dict(case.body)
    body.update({name: _ids(body[name]) for name in ("tokens", "draft_tokens") if name in body})
    if body.get("sampling_cfg"):
        words = [_ids(word) for word in body["sampling_cfg"].get("bad_words", ())]
        body["sampling_cfg"] = {**body["sampling_cfg"], "bad_words": words, "rule": RULES[turn // 2 % len(RULES)]}
    if "ctx_id" in body:
        _correct_draft(body, turn // 2)
    case.body = body
