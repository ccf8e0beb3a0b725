"""Methods with empty drafts: autoregressive decoding, the baseline, and beam search, whose verifier searches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdemo.core.decode import EmptyDrafter
from specdemo.core.options import OptionSet, option, options
from specdemo.drafters.method import BuildContext, Method

if TYPE_CHECKING:
    from specdemo.core.verifier import BeamSearch

AR = Method(
    name="ar",
    title="autoregressive decoding: the baseline",
    notes="""\
**Autoregressive decoding** runs the target once per token. It is the baseline of every speed-up on this page. It uses
the same decoding loop, with empty drafts.""",
    build=lambda context: EmptyDrafter(),
    drafts=False,
)


@options("Beam search")
class BeamOptions(OptionSet):
    """Options of beam search."""

    num_beams: int = option(
        4, "Beams", "beams of the search", bounds=(1, 64), slider=(1, 16, 1), limit="max_nodes", metavar="N"
    )
    length_penalty: float = option(
        1.0, "Length penalty (above 0: longer)", "above 0 favours longer texts", bounds=(-16, 16), slider=(-2, 2, 0.1)
    )
    min_length: int = option(
        0,
        "Minimum length, tokens",
        "tokens before a beam may end",
        bounds=(0, 1 << 20),
        slider=(0, 512, 1),
        metavar="N",
    )


def _verifier(context: BuildContext) -> BeamSearch:
    from specdemo.core.verifier import BeamSearch

    target, chosen = context.scorer("target"), context.options
    return BeamSearch(
        target.score,
        context.sampling,
        context.stop,
        max_tokens=chosen.max_tokens,
        context=target.context,
        num_beams=chosen.num_beams,
        length_penalty=chosen.length_penalty,
        top_k=chosen.top_k,
        min_length=chosen.min_length,
    )


BEAM = Method(
    name="beam",
    title="beam search for the most probable text",
    notes="""\
**Beam search** extends the most probable texts by a token per pass and drops the others. All beams share a pass as
a forest over the same KV cache. A token is committed once all beams agree on it. Grey text is the best beam at this
moment. There is no sampling, and open-ended text tends to repeat. It is slower than autoregressive decoding.
*Graves 1211.3711; length penalty of Wu et al. 1609.08144, as implemented in transformers.*""",
    build=lambda context: EmptyDrafter(),
    options=(BeamOptions,),
    shape="forest",
    drafts=False,
    exact=False,
    samples=False,
    local_target=True,
    verifier=_verifier,
)
