"""Proof bundles of `prove`, and the command `check-bundle`, which repeats their runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specdemo import __version__
from specdemo.bench.equality import PROGRAM, EqualityResult, prove
from specdemo.cli.arguments import given
from specdemo.cli.output import PROGRESS_S, StatusLine, read_limited
from specdemo.core.errors import UserError
from specdemo.external.client import top_tokens_of
from specdemo.external.proof_bundle import ProofBundle, ProvedRun, read_bundle
from specdemo.models.identity import file_digests, identify
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import fingerprint
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe, plan_run

_OPTIONS = (  # that decide a text, without names of models and devices
    *("method", "gamma", "temperature", "top_p", "rule", "max_tokens"),
    *("dtype", "quantization", "drafter_quantization", "activations", "universal"),
)


def proof_bundle(results: Sequence[EqualityResult], pool: ModelPool) -> ProofBundle:
    recipes = [result.recipe for result in results]
    target = pool.get(plan_run(recipes[0]).target)
    numerics = identify(target, fingerprint(target.tokenizer), pool.hub).numerics
    software = {PROGRAM: {"version": __version__, "engine": target.engine, "numerics": numerics}}
    for result in results:
        if server := result.recipe.external:
            version = top_tokens_of(server, result.proved[0].prompt_ids).system_fingerprint
            software[result.engine] = {"version": version or "unknown"}
    runs = [
        ProvedRun(
            engine=result.engine,
            options={name: getattr(result.recipe, name) for name in _OPTIONS},
            texts=result.proved,
        )
        for result in results
    ]
    return ProofBundle(software=software, files=_files(recipes, pool), runs=runs)


def _files(recipes: Sequence[Recipe], pool: ModelPool) -> dict[str, str]:
    """Load the models; return the SHA-256 of their files by `role/file`."""
    digests = {}
    for plan in map(plan_run, recipes):
        for role, spec in plan.models.items():
            digests[role] = file_digests(spec.name, pool.get(spec).spec.revision, pool.hub)
        if plan.head is not None:
            pool.get_head(plan.head)
            digests["head"] = file_digests(plan.head.name, None, pool.hub)
    return {f"{role}/{file}": digest for role, files in digests.items() for file, digest in files.items()}


def check_proof(options: argparse.Namespace) -> int:
    """Return 1 if a repeated text differs. Raises `UserError` for a bundle that cannot be repeated."""
    bundle = read_bundle(read_limited(options.file, "a proof bundle", "prove fewer prompts"))
    common, pool = given(options), ModelPool()
    results = [EqualityResult(_repeated(run, common)) for run in bundle.runs]
    prompts = [Prompt("", f"text {i}", text.prompt) for i, text in enumerate(bundle.runs[0].texts)]
    if different := _files([result.recipe for result in results], pool).items() ^ bundle.files.items():
        raise UserError(
            f"the bundle was made with other files ({min(different)[0][:100]}): name its models, see --pair"
        )
    progress = StatusLine(PROGRESS_S)
    for i, _ in enumerate(prove(results, prompts, pool), 1):
        progress.show(f"{i} of {len(prompts)} prompts")
    progress.clear()
    changed = 0
    for run, result in zip(bundle.runs, results, strict=True):
        for i, (text, repeated) in enumerate(zip(run.texts, result.proved, strict=True)):
            if not text.repeats(repeated):
                changed += 1
                print(f"text {i} of {run.engine} {run.options} is another one here")
    count = len(bundle.runs) * len(prompts)
    print(f"{count} texts repeated, {changed} of them with other ids or margins")
    return 1 if changed else 0


def _repeated(run: ProvedRun, common: dict[str, Any]) -> Recipe:
    server = common.get("external")
    if run.engine != PROGRAM and run.engine != str(server).partition("=")[0]:
        raise UserError(f"the bundle has a run of {run.engine!r}: give its server as --external ENGINE=URL")
    if unknown := run.options.keys() - set(_OPTIONS):
        raise UserError(f"unknown option {min(unknown)!r}: known are {', '.join(_OPTIONS)}")
    return replace(Recipe(), **{**common, **run.options, "external": server if run.engine != PROGRAM else None})
