"""Self-speculation: the target drafts with some of its layers skipped (2309.08168, 2404.16710)."""

from __future__ import annotations

from collections.abc import Sequence

from specdemo.core.options import OptionRule, OptionSet, option, options
from specdemo.drafters.chain import ModelDrafter
from specdemo.drafters.method import BuildContext, Method

_ONE_SELECTION = OptionRule(
    ("exit_layer",),
    lambda chosen, name: chosen.exit_layer is not None and chosen.skip_layers,
    "exit_layer and skip_layers both select the layers",
    "give either exit_layer or skip_layers",
)


@options("Self-speculation", rules=(_ONE_SELECTION,))
class SelfOptions(OptionSet):
    """Options of self-speculation, which select the layers that draft."""

    exit_layer: int | None = option(
        None,
        "Number of layers (0: half of them)",
        "keep the first K layers (default: half)",
        bounds=(1, 1 << 10),
        metavar="K",
    )
    skip_layers: tuple[int, ...] = option(
        (), "Skipped layers", "skip this layer; may be repeated", flag="--skip-layer", metavar="I"
    )


def _build(context: BuildContext) -> ModelDrafter:
    chosen = context.options

    def layers(count: int) -> Sequence[int]:
        if chosen.skip_layers:
            return [i for i in range(count) if i not in chosen.skip_layers]
        return range(count // 2 if chosen.exit_layer is None else chosen.exit_layer)

    model = context.scorer("target", layers)
    noise = context.noise("draft")
    return ModelDrafter(model.score, context.draft_sampling, noise, context.vocab_size, model.vocab_size, model.extend)


METHOD = Method(
    name="self",
    title="the target drafts with some of its layers skipped",
    notes="""\
**Self-speculation** drafts with the target and skips some of its layers. It needs no second model, tokenizer or
weights. Rejection sampling makes it exact, as for any draft distribution. Models trained for early exit gain much,
other models little. *Draft & Verify 2309.08168; LayerSkip 2404.16710.*""",
    build=_build,
    options=(SelfOptions,),
    sampled=True,
    local_target=True,
    decoder_only=True,
)
