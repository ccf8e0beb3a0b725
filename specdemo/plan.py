"""Plan of a run: what the values of a recipe decode with, and what they guarantee."""

from __future__ import annotations

from dataclasses import dataclass

from specdemo.core.policies import DraftLengths
from specdemo.core.rules import RULES
from specdemo.drafters import METHODS
from specdemo.drafters.method import Method
from specdemo.external.address import EngineAddress
from specdemo.models.spec import HeadSpec, ModelSpec
from specdemo.option_rules import draft_lengths
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig


@dataclass(frozen=True)
class RunPlan:
    """Executed method, models, connection and draft lengths of a recipe."""

    recipe: Recipe
    method: Method  # ar if edge or cloud decodes alone
    target: ModelSpec  # model of the text: that of the edge if it decodes alone
    drafter: ModelSpec | None
    head: HeadSpec | None
    cloud: CloudConfig | None  # service of the target; None if the target is in this process
    server: EngineAddress | None  # server of another engine, which decodes
    lengths: DraftLengths

    @property
    def models(self) -> dict[str, ModelSpec]:
        """Models in this process, by role."""
        models = {} if self.cloud is not None else {"target": self.target}
        return models if self.drafter is None else {**models, "drafter": self.drafter}

    @property
    def edge_alone(self) -> bool:
        """True if the draft model decodes in place of the target."""
        return self.recipe.cloud is not None and self.recipe.cloud.edge_only

    @property
    def needs_local_service(self) -> bool:
        return self.cloud is not None and not self.cloud.remote

    @property
    def baseline(self) -> bool:
        """True for AR decoding by this program."""
        return self.recipe.method == "ar" and self.server is None

    @property
    def exact(self) -> bool:
        """True if the text follows the target's distribution; unknown of other engines, so False."""
        recipe, cloud = self.recipe, self.recipe.cloud
        if self.server is not None:
            return False
        if cloud is not None and (cloud.mode != "speculative" or not cloud.exact(self._sends_rows)):
            return cloud.exact(self._sends_rows)
        if not self.method.drafts:
            return self.method.exact
        from specdemo.core.sampling import SamplingParams

        corrected = not recipe.skip_sample_adjustment or recipe.temperature == 0
        return self.method.exact and RULES[recipe.rule].exact(SamplingParams(recipe.temperature)) and corrected

    @property
    def fixed_text(self) -> bool:
        """True if the text does not depend on draft lengths."""
        recipe = self.recipe
        return self.exact and (recipe.temperature == 0 or RULES[recipe.rule].shares_noise)

    @property
    def longest_chain(self) -> int | None:
        """Return the largest length of chains that are cached and drafted as a whole, before a policy may cut them."""
        whole = self.recipe.policy == "fixed" or (self.recipe.policy == "path" and not self.lengths.least)
        return self.lengths.most if whole and self.recipe.use_cache and self.method.shape == "chain" else None

    @property
    def _sends_rows(self) -> bool:
        """True if drafts are sampled and corrections need their distributions."""
        recipe = self.recipe
        drafting = recipe.temperature if recipe.drafter_temperature is None else recipe.drafter_temperature
        sampled = METHODS[recipe.method].sampled and min(recipe.temperature, drafting) > 0
        return sampled and RULES[recipe.rule].needs_rows


def plan_run(recipe: Recipe) -> RunPlan:
    """Derive the plan of a recipe. Raises `UserError` if a pair is not installed."""
    cloud = recipe.cloud
    alone = cloud is not None and cloud.mode != "speculative"
    method = METHODS["ar" if alone else recipe.method]
    target = recipe.spec("target")
    if cloud is not None and cloud.edge_only:
        target = recipe.spec("drafter")
        cloud = None
    assert target is not None  # a rule of recipes
    head = HeadSpec(recipe.head_name, target) if method.uses_head and recipe.head_name is not None else None
    return RunPlan(
        recipe=recipe,
        method=method,
        target=target,
        drafter=recipe.spec("drafter") if method.uses_model and head is None else None,
        head=head,
        cloud=cloud,
        server=None if recipe.external is None else EngineAddress.parse(recipe.external),
        lengths=draft_lengths(recipe),
    )
