"""How the fuzzer's nonsense gets further than the door: hooks that schemathesis loads, see `fuzz.py`.

What the description allows is seldom what a model can judge: ids are far outside its vocabulary, lengths do not agree.
So every other body that the description allows is put right in that respect, and in nothing else: contexts, forests,
rows and rules get their share. Runs where schemathesis is installed, which may be nowhere near the program: imports
nothing of it.
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
RULES = ("rejection", "match", "coupled", "top1", "ratio", "threshold", "typical")
FLAT = base64.b64encode(b"\x00\x00\x80\x3f" * VOCABULARY).decode()  # a row: ones, little-endian
LONGEST = 64  # tokens of a text, so that there is time for many
turns = count()


def _ids(values: list[int]) -> list[int]:
    return [value % VOCABULARY for value in values[:LONGEST]]


def _round(body: dict[str, Any], turn: int) -> None:
    """Lengths that agree, rows that are laws, a few contexts for all; three of four are opened."""
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
    """In the binary encoding; what it has no way to write is sent as nothing."""
    try:
        return msgpack.packb(value)
    except (OverflowError, TypeError, ValueError):
        return b""


@schemathesis.deserializer("application/msgpack")
def unpacked(context: Any, response: Any) -> Any:
    """What an answer says; probabilities come in an extension of four bytes each."""
    return msgpack.unpackb(response.content, ext_hook=lambda kind, data: list(memoryview(data).cast("f")))


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Put every other body right; what the description forbids stays as it is."""
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
        _round(body, turn // 2)
    case.body = body
