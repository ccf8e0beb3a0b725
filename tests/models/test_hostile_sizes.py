"""Every number of config.json and of GGUF headers: refused with one sentence, or a run equal to the engine for torch.

The models are loaded in other processes, so that a crash or an endless run fails a test instead of ending all tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from fakes.hostile_sizes import (
    FAMILIES,
    Case,
    all_cases,
    run_cases,
    save_case,
)
from fakes.tiny_models import tiny_model

from specdemo.cli import main
from specdemo.core.errors import UserError
from specdemo.models.engines.native_families import model_parts

ROPE = "rope_parameters.partial_rotary_factor"
ROTATED = [
    *(Case(f"llama, {kind}", ((ROPE, factor),)) for kind in ("linear", "llama3", "yarn") for factor in (0.5, 1.5, 4.0)),
    *(Case("llama, old names", (("partial_rotary_factor", factor),)) for factor in (0.5, 1000.0)),
    *(Case("gpt-neox", (("rotary_pct", share),)) for share in (0.1, 2.0, 1000.0)),
]


def heads(family: str, count: int, head_dim: int, gguf: bool = False) -> Case:
    """Model whose matrices have two rows or columns, so that many large heads need little memory."""
    sizes = {"hidden_size": 2, "num_attention_heads": count, "num_key_value_heads": 1, "head_dim": head_dim}
    return Case(family, tuple(sizes.items()), True, gguf)


LARGE_HEADS = [heads("mistral", 4096, 1024), heads("qwen3", 32, 65_536, gguf=True)]
ODD_HEADS = [
    Case("llama", (("head_dim", 15),), matching=True),
    Case("llama", tuple((f"{{arch}}.attention.{name}_length", 15) for name in ("key", "value")), gguf=True),
]
NUMBERS = [("hidden_size", 1 << 31), ("rms_norm_eps", float("nan")), ("num_hidden_layers", 3)]
REFUSED = [*ROTATED, *LARGE_HEADS, *ODD_HEADS, *(Case("llama", (change,)) for change in NUMBERS)]
RUNNING = [
    heads("mistral", 4096, 64),
    Case("mistral", (("head_dim", 4096),), matching=True),
    Case("mistral", (("sliding_window", (1 << 31) - 1),)),
    Case("llama", (("max_position_embeddings", 1 << 24),)),
    Case("gpt-neox", (("rotary_pct", 0.5),)),
    Case("gpt-neox", (("rotary_pct", 1.0),)),
    Case("gpt2", (("n_embd", 60), ("n_head", 4)), matching=True),
    Case("qwen3", (("head_dim", 2),), matching=True),
]
USUAL = [*(Case(family, ()) for family in FAMILIES), Case("llama", (), gguf=True), Case("qwen3", (), gguf=True)]


def compare(cases: Sequence[Case], folder: Path, refused_too: bool = False) -> Iterator[tuple[Case, str]]:
    """Yield each case with its refusal, or an empty text if its logits equal those of torch.

    Torch alone loads the cases that the native engine ran; with `refused_too` also the others.
    """
    native = run_cases(cases, folder / "native", native=True)
    loaded = [case for case in cases if refused_too or "refused" not in native[case.name]]
    torch_alone = run_cases(loaded, folder / "torch", native=False)
    for case in cases:
        outcome, expected = native[case.name], torch_alone.get(case.name, {})
        assert {*outcome, *expected} <= {"refused", "logits", "engine"}, (case.name, outcome, expected)
        if "refused" in outcome:
            text = outcome["refused"]
            assert text.isprintable() and len(text) < 450 and ": " in text, (case.name, text)
            yield case, text
            continue
        if "refused" in expected:  # too small for the check of architectures in transformers
            assert case.changes in ((("vocab_size", 1),), (("n_positions", 3),)), (case.name, expected)
            continue
        values, rows = (torch.tensor(each["logits"]) for each in (outcome, expected))
        assert torch.allclose(values, rows, rtol=1e-4, atol=1e-4, equal_nan=True), case.name
        yield case, ""


@pytest.mark.slow
def test_contradictions_are_refused_and_others_run_as_with_torch(tmp_path: Path) -> None:
    part = [case for case in all_cases() if case.family in ("llama", "gpt-neox") and not case.matching][::18]
    outcomes = dict(compare([*REFUSED, *RUNNING, *USUAL, *part], tmp_path))
    assert all(outcomes[case] for case in REFUSED) and not any(outcomes[case] for case in (*RUNNING, *USUAL))
    table = (Path(__file__).parents[2] / "SECURITY.md").read_text("utf-8").partition("| file | refusal |")[2]
    documented = [row.split(" | ")[1].removesuffix(" |") for row in table.partition("\n\n")[0].splitlines()[2:]]
    refusals = " ".join(outcomes.values())
    assert len(documented) > 5 and not [text for text in documented if text not in refusals]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_all_numbers(family: str, tmp_path: Path) -> None:
    cases = [case for case in all_cases() if case.family == family]
    assert {text for _, text in compare(cases, tmp_path, refused_too=True)} > {""}


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("llama, linear", ((ROPE, 4.0),)), LARGE_HEADS[-1]], ids=lambda case: case.name)
def test_terminal_exits_with_2(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_case(case, tmp_path / "model", tmp_path)
    assert main(["run", "def", "--target", str(path), "--method", "ar"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith("specdemo: ") and "Traceback" not in "".join(errors)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt-neox"])
def test_matrices_of_other_shapes_do_not_reach_the_native_engine(kind: str) -> None:
    model = tiny_model(kind)
    model_parts(model)
    model.lm_head = torch.nn.Linear(32, 60, bias=False)
    with pytest.raises(UserError, match="a matrix of another shape"):
        model_parts(model)
