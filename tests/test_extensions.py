"""Extensions in one place each: a drafter, a rule, a policy and an option appear in every interface."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.enumeration import PROMPT, ROUNDING, SAMPLING, SMALL, VOCAB, distance, enumerated, true_distribution
from fakes.forked_process import ForkedProcess, run_with_new_modules
from fakes.page import form_fields
from fakes.tiny_models import EnumeratedVerifier, TableHead, committed, run

from benchmarks.cli_reference import cli_reference
from specdemo.cli import main
from specdemo.cli.arguments import given, parser
from specdemo.core.decode import DraftBudget
from specdemo.core.policies import POLICIES, CostModel, DraftLengths, Fixed, Policy
from specdemo.core.rules import RULES, Rule, match
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft, Step
from specdemo.drafters import METHODS, option_classes
from specdemo.drafters.method import Method
from specdemo.recipe import Recipe, plan_run
from specdemo.ui.page import build

pytestmark = pytest.mark.slow


# --- content of a new file drafters/echo.py ---------------------------------------------------------------------


class EchoDrafter:
    """Draft the last token again."""

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        count = 0
        while budget.may_extend(count, None):
            count += 1
        return Draft.chain((tokens[-1],) * count)

    def observe(self, step: Step) -> None:
        pass


ECHO = Method("echo", "repeats the last token", "**Echo** repeats the last token.", lambda context: EchoDrafter())

# ---------------------------------------------------------------------------------------------------------------


SMALL_SIZES = {"tree_nodes": 4, "tree_width": 2, "lookahead_window": 1, "lookahead_n": 2, "ngram": 3}


class FakeContext:
    """`BuildContext` on table models: every role is `SMALL`; `random` is the source of all noise."""

    corpus = (PROMPT,)
    vocab_size, stop, source, seed, bridge, has_drafter = VOCAB, (), PROMPT, 0, None, True

    def __init__(self, sampling: SamplingParams, random: Any, head: Any = None) -> None:
        self.sampling = self.draft_sampling = self.drafter_sampling = sampling
        self._random, self._head = random, head
        defaults = {name: option.default for group in option_classes() for name, option in group.OPTIONS.items()}
        self.options = SimpleNamespace(**{**defaults, **SMALL_SIZES})

    def scorer(self, role: str, layers: Callable | None = None) -> Any:
        return SimpleNamespace(score=SMALL.score, extend=SMALL.extend, vocab_size=VOCAB, context=99)

    def head(self) -> Any:
        return self._head

    def noise(self, name: str, *, shared: bool = True) -> Any:
        return self._random

    def with_store(self, make: Callable, *key: Any) -> Any:
        return make(None)


def check_theorem(method: str, policy: str = "fixed", rule: Any = RULES["rejection"].apply) -> int:
    """Compare the enumerated distribution with the target's, greedy and not; return the number of drafted tokens."""
    drafted = 0
    for name in ("greedy", "plain", "top-p", "penalty"):
        sampling, verifier = SAMPLING[name], enumerated(SAMPLING[name], rule)

        def once(sampling: SamplingParams = sampling, verifier: EnumeratedVerifier = verifier) -> tuple[int, ...]:
            nonlocal drafted
            head = TableHead(SMALL, (0, 2, 3), method) if METHODS[method].drafter == "head" else None
            drafter = METHODS[method].build(FakeContext(sampling, verifier.explorer, head))
            steps = run(PROMPT, verifier, drafter, POLICIES[policy].make(DraftLengths(2, 1, 3), CostModel()), 3)
            drafted += sum(len(step.draft) for step in steps)
            return tuple(committed(steps))

        assert distance(verifier.explorer.distribution(once), true_distribution(sampling, 3, ())) < ROUNDING
    return drafted


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.exact])
def test_every_registered_method_is_exact(method: str) -> None:
    assert (check_theorem(method) > 0) == METHODS[method].drafts


def test_a_drafter_a_rule_and_a_policy_need_one_registry_entry_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(METHODS, "echo", ECHO)
    monkeypatch.setitem(RULES, "again", Rule(match, "match by another name: exact", lambda sampling: True))
    monkeypatch.setitem(POLICIES, "pairs", Policy("always two tokens", lambda lengths, costs: Fixed(2)))
    assert check_theorem("echo") > 0
    assert check_theorem("draft", rule=RULES["again"].apply) > 0
    assert check_theorem("draft", policy="pairs") > 0
    recipe = Recipe(**given(parser().parse_args("run x --method echo --rule again --policy pairs".split())))
    assert (recipe.method, recipe.rule, recipe.policy) == ("echo", "again", "pairs") and plan_run(recipe).exact
    assert main(["run", "x", "--method", "magic"]) == 2 and "echo" in capsys.readouterr().err
    page = build()
    page.worker.close()
    fields, reference = form_fields(page.blocks), cli_reference()
    for setting, name, title in (("method", "echo", ECHO.title), ("rule", "again", ""), ("policy", "pairs", "")):
        assert f"`{name}` | {title}" in reference and title in fields[setting].choices[name]


OPTION = """
from specdemo.core.options import option, options
from specdemo.drafters import METHODS, method, suffix

@options("Echo")
class EchoOptions:
    echo_length: int = option(2, "Repetitions", "tokens to repeat", bounds=(1, 9), slider=(1, 9, 1), limit="max_nodes")

METHODS["echo"] = method.Method("echo", "repeats", "", suffix.build_suffix_drafter, options=(EchoOptions,))

from fakes.page import form_fields, form_markup
from specdemo.cli.arguments import given, parser
from benchmarks.cli_reference import cli_reference
from specdemo.core.distributions import DenseProbs
from specdemo.core.errors import UserError
from specdemo.recipe import Recipe
from specdemo.ui.api import api_defaults
from specdemo.ui.limits import HostLimits
from specdemo.ui.page import build
from specdemo.ui.settings import from_link, restored

recipe = Recipe(**given(parser().parse_args(["run", "x", "--method", "echo", "--echo-length", "5"])))
assert recipe.echo_length == 5
for refused in (lambda: Recipe(echo_length=10), lambda: HostLimits(max_nodes=4).grant(recipe, "x")):
    try:
        refused()
    except UserError as error:
        print(error)
page = build(limits=HostLimits(max_nodes=4))
field = form_fields(page.blocks)["echo_length"].attributes
assert (field["min"], field["max"], field["value"]) == ("1", "4", "2")
assert ' data-methods="echo" hidden><summary>Echo</summary>' in form_markup(page.blocks)
defaults = api_defaults(recipe)
assert defaults["echo_length"] == 5
assert restored(from_link({"echo_length": "7"}, defaults), defaults, "cpu")[0]["echo_length"] == 7
assert "| `echo_length` | `--echo-length` | `2` | from 1 to 9 | echo | tokens to repeat |" in cli_reference()
page.worker.close()
"""


def test_an_option_needs_one_field() -> None:
    """In another process: recipes are assembled once, from the options of all registered methods."""
    process = ForkedProcess(run_with_new_modules, OPTION)
    output, errors = process.communicate()
    assert process.wait() == 0, errors
    assert output.splitlines() == [
        "echo_length must be from 1 to 9, not 10",
        "echo_length may be 4 at most here, not 5",
    ]
