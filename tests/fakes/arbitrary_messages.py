"""Hypothesis strategies for messages between edge and cloud, as values of JSON; many requests are valid."""

import base64
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fakes.enumeration import PROMPT, VOCAB
from specdemo.core.rules import RULES
from specdemo.remote.protocol import digest

tokens = st.integers(0, VOCAB - 1)
probabilities = st.floats(0, 1, width=32)
configs = st.fixed_dictionaries(
    {},
    optional={
        "temp": st.sampled_from((0.0, 0.5, 1.0, 100.0)),
        "top_k": st.integers(0, 5),
        "top_p": st.floats(0.001, 1),
        "min_p": st.floats(0, 1),
        "rep_penalty": st.floats(0.01, 100),
        "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=2), max_size=2),
        "seed": st.integers(-(1 << 63), (1 << 63) - 1),
        "rule": st.sampled_from([*RULES]),
        "threshold": st.none() | st.floats(0.001, 1),
        "adjust": st.booleans(),
    },
)


@st.composite
def rows(draw: st.DrawFn, node: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(("f4", "f2")))
    values = draw(st.lists(st.floats(0, 1, width=16), min_size=VOCAB, max_size=VOCAB))
    data = np.array(values, f"<{kind}").tobytes()
    return {"node": node, "type": kind, "values": base64.b64encode(data).decode()}


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Return a request that opens a context with a text, or continues one."""
    n = draw(st.integers(0, 3))
    text = [*PROMPT, *draw(st.lists(tokens, max_size=2))]
    base = draw(st.sampled_from((0, 0, len(PROMPT))))
    request: dict[str, Any] = {
        "ctx_id": draw(st.sampled_from("ab")),
        "round": draw(st.integers(0, 3)),
        "epoch": draw(st.integers(0, 2)),
        "base": base,
        "digest": digest(text[:base]),
        "tokens": text[base:],
        "draft_tokens": draw(st.lists(tokens, min_size=n, max_size=n)),
        "k": n,
    }
    optional = {
        "parents": [draw(st.integers(-1, node - 1)) for node in range(n)],
        "q_token_probs": [draw(probabilities) for _ in range(n)],
        "rows": [draw(rows(node)) for node in range(n)],
        "hard_mask": [draw(st.integers(0, 1)) for _ in range(n)],
        "top": draw(st.integers(0, 5)),
        "candidates": draw(st.integers(1, 5)),
    }
    request |= {name: value for name, value in optional.items() if draw(st.booleans())}
    if base == 0 or draw(st.booleans()):
        request["sampling_cfg"] = draw(configs)
    if draw(st.integers(0, 5)) == 0:  # with the fields of the practice guide
        request = {name: value for name, value in request.items() if name not in ("round", "epoch", "base", "digest")}
    return request


completions = st.fixed_dictionaries(
    {"model": st.sampled_from(("default", "other"))},
    optional={
        "prompt": st.text(max_size=9) | st.lists(st.integers(0, 9), max_size=3),
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(("system", "user", "tool")), "content": st.text(max_size=9)}
            ),
            max_size=3,
        ),
        "max_tokens": st.integers(-1, 3),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(0, 5),
        "seed": st.integers(),
        "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=2),
        "stream": st.booleans(),
        "stream_options": st.just({"include_usage": True}),
        "logprobs": st.booleans() | st.integers(0, 20),
        "top_logprobs": st.integers(0, 20),
        "prediction": st.just({"type": "content", "content": "x"}),
        "speculation": st.booleans(),
        "return_token_ids": st.booleans(),
        "n": st.sampled_from((1, 2)),
    },
)
