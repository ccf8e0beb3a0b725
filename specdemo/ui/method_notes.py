"""A paragraph of theory per method: what it drafts, why it is exact, when it wins, where it comes from."""

ABOUT = {
    "ar": """\
**Plain decoding** asks the target for one token per pass. It is the baseline of every speed-up on this page, measured
by the very same loop with empty drafts, so nothing is won by a slow opponent.""",
    "beam": """\
**Beam search** keeps the few most probable texts so far, grows each by a token per pass and keeps the best again. The
beams ride in one pass as a forest over one text's keys and values; a token is committed once all beams agree on it,
what stands behind it in grey is the best beam of the moment. It looks for one probable text and draws nothing, so it
is neither greedy decoding nor a sample, and on open-ended text it tends to repeat itself. It is no way to be faster.
*Graves 1211.3711; length penalty as in Wu et al. 1609.08144, in the form of transformers.*""",
    "draft": """\
**A draft model** proposes up to γ tokens, each drawn from its own law q. The target scores all of them in one pass;
token x is kept with probability min(1, p(x)/q(x)), and the first one that is not is replaced by a draw from
norm(max(p − q, 0)). What q gave too often is thereby given to what it gave too seldom, so the text has the law p
exactly. It wins where the drafter agrees (α = E[Σ min(p, q)] is high) and costs little (c is low): speed-up (1 −
α^(γ+1)) / ((1 − α)(γc + 1)). *Leviathan et al. 2211.17192; Chen et al. 2302.01318.*""",
    "tree": """\
**A tree** holds several continuations at once: where one guess misses, its sibling may hit. Siblings are drawn
without replacement, each from what the elder ones left of q, and tested one after another against what is left of p,
so the law stays exact. All nodes ride in one pass, each seeing its own ancestors only. It wins where rows of a pass
are almost free and the drafter is often second-best right. *SpecInfer 2305.09781; Sequoia 2402.12374.*""",
    "nasd": """\
**NASD** drafts from n-grams: what followed the last tokens in the prompt and in the text so far, longest context
first, with the target's runners-up as fillers (one filler makes it NAPD). Its guesses are point masses: y is kept
with probability p(y), and otherwise the correction is drawn from p without y, which is exact. Drafting costs nothing,
so it wins wherever text repeats itself and loses little elsewhere. *ANPD 2404.08698.*""",
    "suffix": """\
**Suffix decoding** looks for the longest ending of the text that occurred before, however long, in a suffix automaton
that grows in constant amortised time per token, and drafts what followed then. The longer the match, the longer the
draft. Point masses, so exact as n-grams are. It wins on tables, edits and anything that quotes itself at length.
*SuffixDecoding 2411.04975.*""",
    "hybrid": """\
**The hybrid** asks the suffixes where the repetition is long and the draft model elsewhere. Each round is the one or
the other, decided before anything is drawn, so both proofs carry over. It wins on mixed text.""",
    "self": """\
**Self-speculation** drafts with the target itself, some of its layers left out: no second model, no second tokenizer,
no further weights. Its law is a law like any other, so rejection sampling keeps the text exact. Models trained to
answer early win much, others little: the acceptance rate on this page tells which one you have. *Draft & Verify
2309.08168; LayerSkip 2404.16710.*""",
    "lookahead": """\
**Lookahead** lets the target guess ahead of itself: a window of guesses rides along in every pass as a comb, the
answers at its teeth become the next guesses (a Jacobi iteration), and what comes out often enough is kept as n-grams
and drafted. Point masses, so exact. It buys guesses with rows: it wins where a pass over many rows costs what a pass
over one does, and loses where it does not. Most of what it draws is never meant to be kept, so its acceptance rate
looks low. *Fu et al. 2402.02057.*""",
    "lookup": """\
**Prompt lookup** copies what followed the first place where the last two tokens stood before. It is how
`transformers` does it, here for comparison: exact like every point mass, but it forgets what came later and searches
the whole text in every round.""",
}
