"""The sidebar, and the chips under the prompt."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any

import gradio as gr

from specdemo.core.policies import POLICIES
from specdemo.core.rules import RULES
from specdemo.models.quantization import unavailable
from specdemo.models.spec import QUANTIZATIONS, find_device
from specdemo.models.zoo import PAIRS, offers
from specdemo.recipe import METHODS, NGRAM_LEVELS, Recipe
from specdemo.remote.config import ALWAYS, ENCODINGS, ON_LOSS, Q_ROWS, SIGNALS, CloudConfig
from specdemo.ui.limits import HostLimits
from specdemo.ui.settings import OFF, WHERE

Controls = dict[str, gr.components.Component]
PICK = "(method) => { const one = %s[method]; return [one.prompt, method, one.temperature]; }"
NUMBERS = {  # of the wire: label and step of each
    "deadline_ms": ("Deadline of a round, ms", 50),
    "lost_after_s": ("Lost after, s", 1),
    "gate_nll": ("NLL, hard above", 0.1),
    "gate_entropy": ("Entropy, hard above", 0.1),
    "gate_margin": ("Margin, hard below", 0.05),
    "gate_variance": ("Variance, hard above", 0.005),
    "gate_ratio": ("Share that may be hard", 0.05),
    "rtt_ms": ("Round trip, ms", 5),
    "jitter_ms": ("Jitter each way, ms", 1),
    "loss": ("Share of messages lost", 0.01),
    "up_mbit": ("Up, Mbit/s (0: all)", 1),
    "down_mbit": ("Down, Mbit/s (0: all)", 1),
}


def _most(usually: int, limit: int | None) -> int:
    return usually if limit is None else min(usually, limit)


def sidebar(usual: Recipe, limits: HostLimits, unload: Callable[[], Awaitable[str]]) -> Controls:
    """The controls, by the name of the recipe's field that each one sets; none offers what the host refuses.

    `unload` frees memory and says how much.
    """
    device = find_device(usual.device)

    def choice(label: str, name: str, known: dict[str, Any], **more: Any) -> gr.Dropdown:
        return gr.Dropdown(list(known), value=getattr(usual, name), label=label, **more)

    with gr.Sidebar(width=310, elem_id="settings"):
        pairs = [(offer.label, offer.name) for offer in offers(usual.device) if offer.name in limits.pairs]
        c: Controls = {
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
        if limits.remote != ():
            with gr.Accordion("Edge and cloud", open=False, elem_id="edge-cloud"):
                _edge_cloud(c, limits)
        with gr.Accordion("Recording", open=False):
            c["top"] = gr.Slider(
                0, 16, usual.top, step=1, label="Likeliest tokens of every law (0: none)", elem_id="top"
            )
    return c


def _edge_cloud(c: Controls, limits: HostLimits) -> None:
    """Where the target is, and how it is reached; what a host does not allow is not there."""
    usual = {field.name: field.default for field in fields(CloudConfig)}

    def choice(name: str, label: str, known: dict[str, str], value: str) -> None:
        offered = [(f"{one}: {about}", one) for one, about in known.items()]
        c[name] = gr.Dropdown(offered, value=value, label=label, elem_id=name.replace("_", "-"))

    def numbers(*names: str) -> None:
        with gr.Row():
            for name in names:
                label, step = NUMBERS[name]
                c[name] = gr.Number(usual[name], label=label, step=step, min_width=110, elem_id=name.replace("_", "-"))

    choice("mode", "Mode", WHERE, OFF)
    if limits.remote is None:
        c["remote"] = gr.Textbox(
            "",
            label="Service",
            info="Empty: a cloud of its own on this machine, started when it is needed.",
            placeholder="http://host:8300",
            max_lines=1,
            elem_id="remote",
        )
    else:
        c["remote"] = gr.Dropdown(list(limits.remote), value=limits.remote[0], label="Service", elem_id="remote")
    choice("encoding", "Encoding", ENCODINGS, usual["encoding"])
    choice("q_rows", "Rows of q", Q_ROWS, usual["q_rows"])
    numbers("deadline_ms", "lost_after_s")
    c["provisional"] = gr.Checkbox(
        usual["provisional"], label="Past the deadline commit the draft's first token (lossy)", elem_id="provisional"
    )
    choice("on_loss", "When the cloud is lost", ON_LOSS, usual["on_loss"])
    c["gates"] = gr.CheckboxGroup(
        list(SIGNALS | ALWAYS),
        value=list(usual["gates"]),
        label="Gates (lossy)",
        info="Ask the cloud only about drafts that are hard by any of these. None: always.",
        elem_id="gates",
    )
    numbers("gate_nll", "gate_entropy")
    numbers("gate_margin", "gate_variance")
    numbers("gate_ratio")
    if limits.remote is None:
        gr.Markdown("An emulated link, on top of the one that there is:")
        numbers("rtt_ms", "jitter_ms")
        numbers("up_mbit", "down_mbit")
        numbers("loss")


def examples_row(shown: dict[str, Any], prompt: gr.Textbox, controls: Controls) -> None:
    """Chips that set prompt, method and temperature; `shown` is what `examples.json` holds."""
    set_by_chip = [prompt, controls["method"], controls["temperature"]]
    with gr.Row(elem_id="examples"):
        for example in shown["ready"]:
            chip = gr.Button(example["title"], size="sm", elem_classes="chip")
            choice = json.dumps([example["prompt"], example["method"], example["temperature"]])
            chip.click(None, None, set_by_chip, js=f"() => {choice}", api_visibility="private")
        for which, words in (("best", "This method at its best"), ("worst", "… and at its worst")):
            chip = gr.Button(words, size="sm", elem_classes="chip", elem_id=f"at-{which}")
            choices = json.dumps({name: one[which] for name, one in shown["methods"].items()})
            chip.click(None, controls["method"], set_by_chip, js=PICK % choices, api_visibility="private")
