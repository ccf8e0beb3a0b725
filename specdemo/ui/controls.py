"""The sidebar, and what its settings mean."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any

import gradio as gr

from specdemo.core.errors import Refused
from specdemo.core.gamma import POLICIES
from specdemo.core.rules import RULES
from specdemo.limits import Limits
from specdemo.models.pairs import PAIRS, offers
from specdemo.models.quantise import unavailable
from specdemo.models.spec import QUANTIZATIONS, find_device
from specdemo.recipe import METHODS, NGRAM_LEVELS, Recipe

LONGEST_NAME = 300  # characters; a local directory may take some


def recipe_of(settings: dict[str, Any], device: str) -> Recipe:
    """The recipe that raw settings from a browser or a client mean; `Refused` if they cannot mean one."""
    clean = {}
    for field in fields(Recipe):
        if field.name not in settings:
            continue
        value, usual = settings[field.name], field.default
        if usual is None and value in (None, 0, ""):  # a field of numbers cannot be left empty in every browser
            continue
        if isinstance(usual, bool):
            if not isinstance(value, bool):
                raise Refused(f"{field.name} must be true or false, not {value!r}")
        elif isinstance(usual, (int, float)) or field.name == "exit_layer":
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise Refused(f"{field.name} must be a number, not {'empty' if value is None else repr(value)}")
            if not isinstance(usual, float):
                if value != value or value % 1:
                    raise Refused(f"{field.name} must be a whole number, not {value}")
                value = int(value)
        elif not isinstance(value, str):
            raise Refused(f"{field.name} must be a name, not {value!r}")
        elif len(value) > LONGEST_NAME:
            raise Refused(f"{field.name} must be a name of at most {LONGEST_NAME} characters, not {len(value):,}")
        elif field.name == "skip_layers":
            value = _numbers(field.name, value)
        clean[field.name] = value.strip() if isinstance(value, str) else value
    if clean.get("target"):
        clean.pop("pair", None)  # one's own models in place of a ready pair
    return Recipe(device=device, **clean)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Numbers with commas or spaces between them."""
    words = text.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise Refused(f"{name} must be numbers like 5, 7, not {text!r}")
    return tuple(map(int, words))


def _most(usually: int, limit: int | None) -> int:
    return usually if limit is None else min(usually, limit)


def sidebar(usual: Recipe, limits: Limits, unload: Callable[[], Awaitable[str]]) -> dict[str, gr.components.Component]:
    """The controls, by the name of the recipe's field that each one sets; none offers what the host refuses.

    `unload` frees memory and says how much.
    """
    device = find_device(usual.device)

    def choice(label: str, name: str, known: dict[str, Any], **more: Any) -> gr.Dropdown:
        return gr.Dropdown(list(known), value=getattr(usual, name), label=label, **more)

    with gr.Sidebar(width=310, elem_id="settings"):
        pairs = [(offer.label, offer.name) for offer in offers(usual.device) if offer.name in limits.pairs]
        c: dict[str, gr.components.Component] = {
            "pair": gr.Dropdown(pairs, value=usual.pair, label="Drafter and target", elem_id="pair"),
            "method": gr.Dropdown(
                [(f"{name}: {about}", name) for name, about in METHODS.items()],
                value=usual.method,
                label="Method",
                elem_id="method",
            ),
            "gamma": gr.Slider(
                1, _most(16, limits.max_gamma), usual.gamma, step=1, label="Draft length γ", elem_id="gamma"
            ),
            "policy": gr.Dropdown(
                [(f"{name}: {policy.title}", name) for name, policy in POLICIES.items()],
                value=usual.policy,
                label="Draft-length policy",
                elem_id="policy",
            ),
            "temperature": gr.Slider(0, 2, usual.temperature, step=0.05, label="Temperature", elem_id="temperature"),
            "top_p": gr.Slider(0.05, 1, usual.top_p, step=0.05, label="Top-p", elem_id="top-p"),
            "max_tokens": gr.Slider(
                1,
                _most(1024, limits.max_tokens),
                usual.max_tokens,
                step=1,
                label="Max new tokens",
                elem_id="max-tokens",
            ),
            "seed": gr.Number(usual.seed, precision=0, label="Seed", elem_id="seed"),
        }
        with gr.Accordion("Vocabularies", open=False):
            c["universal"] = gr.Checkbox(
                usual.universal, label="Re-encode the text of a drafter of another vocabulary", elem_id="universal"
            )
        c["pair"].change(
            lambda name: PAIRS[name].gamma if name in PAIRS else gr.skip(),
            c["pair"],
            c["gamma"],
            show_progress="hidden",
            queue=False,
            api_visibility="private",
        )
        with gr.Accordion("Your own models", open=False):
            c["target"] = gr.Textbox(
                "", label="Target", placeholder="Hugging Face id or local directory", max_lines=1, elem_id="target"
            )
            c["drafter"] = gr.Textbox(
                "", label="Drafter", placeholder="of the same family", max_lines=1, elem_id="drafter"
            )
        with gr.Accordion("Quantisation and memory", open=False):
            ways = [
                (f"{name}: {unavailable(name, device) or known.title}", name) for name, known in QUANTIZATIONS.items()
            ]
            for name, label in (("quantization", "Target"), ("drafter_quantization", "Drafter")):
                c[name] = gr.Dropdown(ways, value=getattr(usual, name), label=label, elem_id=name.replace("_", "-"))
            if not limits.public:
                freed = gr.Markdown(elem_id="freed")
                gr.Button("Unload models", size="sm", elem_id="unload").click(
                    unload, None, freed, show_progress="hidden", concurrency_limit=None, api_visibility="private"
                )
        with gr.Accordion("NASD", open=False):
            c["ngram"] = gr.Slider(2, 8, usual.ngram, step=1, label="Order n", elem_id="ngram")
            c["filler_top_k"] = gr.Slider(
                1, 8, usual.filler_top_k, step=1, label="Fillers per row (1 is NAPD)", elem_id="filler-top-k"
            )
            c["ngram_levels"] = choice("Storage", "ngram_levels", NGRAM_LEVELS, elem_id="ngram-levels")
            c["ngram_keep"] = gr.Checkbox(usual.ngram_keep, label="Keep n-grams between runs", elem_id="ngram-keep")
        with gr.Accordion("Trees", open=False):
            c["tree_nodes"] = gr.Slider(
                1, _most(64, limits.max_nodes), usual.tree_nodes, step=1, label="Nodes", elem_id="tree-nodes"
            )
            c["tree_width"] = gr.Slider(1, 8, usual.tree_width, step=1, label="Children per node", elem_id="tree-width")
        with gr.Accordion("Lookahead", open=False):
            c["lookahead_window"] = gr.Slider(
                1, 16, usual.lookahead_window, step=1, label="Places ahead", elem_id="lookahead-window"
            )
            c["lookahead_n"] = gr.Slider(2, 8, usual.lookahead_n, step=1, label="Order n", elem_id="lookahead-n")
            c["lookahead_guesses"] = gr.Slider(
                1, 16, usual.lookahead_guesses, step=1, label="Guesses per round", elem_id="lookahead-guesses"
            )
        with gr.Accordion("Beam search", open=False):
            c["num_beams"] = gr.Slider(1, 16, usual.num_beams, step=1, label="Beams", elem_id="num-beams")
            c["length_penalty"] = gr.Slider(
                -2,
                2,
                usual.length_penalty,
                step=0.1,
                label="Length penalty (above 0: longer)",
                elem_id="length-penalty",
            )
            c["min_length"] = gr.Slider(0, 512, usual.min_length, step=1, label="Least tokens", elem_id="min-length")
        with gr.Accordion("Self-speculation", open=False):
            c["exit_layer"] = gr.Number(
                usual.exit_layer or 0, precision=0, label="Layers kept (0: half of them)", elem_id="exit-layer"
            )
            c["skip_layers"] = gr.Textbox(
                "", label="Or layers left out", placeholder="5, 7", max_lines=1, elem_id="skip-layers"
            )
        with gr.Accordion("Rule", open=False):
            c["rule"] = gr.Dropdown(
                [(f"{name}: {rule.title}", name) for name, rule in RULES.items()],
                value=usual.rule,
                label="Acceptance rule",
                elem_id="rule",
            )
            c["top_k"] = gr.Slider(0, 100, usual.top_k, step=1, label="Top-k (0 is off)", elem_id="top-k")
        with gr.Accordion("Chat", open=False):
            c["chat"] = gr.Checkbox(
                usual.chat,
                label="Chat template",
                info="The prompt is said by a user, in the model's own template; each run is a turn of a conversation.",
                elem_id="chat",
            )
        with gr.Accordion("Recording", open=False):
            c["top"] = gr.Slider(
                0, 16, usual.top, step=1, label="Likeliest tokens of every law (0: none)", elem_id="top"
            )
    return c
