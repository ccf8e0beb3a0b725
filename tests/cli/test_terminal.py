"""Terminal commands: output, exit codes, and one clear sentence for each kind of invalid input."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model, sentencepiece_tokenizer

from specdemo.cli import main
from specdemo.cli.arguments import parser
from specdemo.cli.run import recipe_of_flags
from specdemo.core.metrics import Metrics
from specdemo.core.step_record import step_of
from specdemo.native import build

pytestmark = pytest.mark.slow

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "target": str(save_model(root / "target", byte_level_tokenizer())),
        "drafter": str(save_model(root / "drafter", byte_level_tokenizer(), seed=1, num_hidden_layers=1)),
        "stranger": str(save_model(root / "stranger", sentencepiece_tokenizer())),
    }


def pair(models: dict[str, str]) -> list[str]:
    return ["--target", models["target"], "--drafter", models["drafter"], "--device", "cpu", "--max-tokens", "20"]


def test_a_refused_run_ends_the_compilation_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def compiling() -> None:
        try:
            build.compiler_processes.run([sys.executable, "-c", "import signal; signal.pause()"], 600)
        except build.CompilationStopped:
            ended.append(True)
            raise

    monkeypatch.setattr(build, "native_library", compiling)
    assert main(["run", PROMPT, "--gamma", "99"]) == 2 and ended == [True]


@pytest.mark.parametrize("method", ["draft", "nasd", "ar"])
def test_json_is_the_trace(models: dict[str, str], method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", PROMPT, *pair(models), "--method", method, "--json"]) == 0
    head, *steps, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert head["specdemo"] == 1 and head["recipe"]["method"] == method and head["vocab_size"] == 300
    assert head["prompt_tokens"] == byte_level_tokenizer().encode(PROMPT) and "torch" in head["environment"]
    named = {"i", "tokens", "text", "draft", "draft_text", "parents", "accepted", "token", "kind", "p", "q", "top"}
    metrics = Metrics.of(map(step_of, steps))
    for i, step in enumerate(steps):
        assert step.keys() >= named | {"gamma", "draft_s", "verify_s", "t"} and step["i"] == i
        assert step["text"] == "".join(step["pieces"]) and len(step["pieces"]) == len(step["tokens"])
        assert len(step["draft_text"]) == len(step["draft"])
    assert end["end"] in ("stop", "length") and end["error"] is None
    assert end["metrics"].items() >= metrics.as_dict().items()
    assert end["metrics"]["tokens"] == sum(len(step["tokens"]) for step in steps)
    assert {"peak_rss_bytes", "peak_device_bytes", "kv_bytes"} <= end["metrics"].keys()
    assert (end["metrics"]["drafted"] > 0) == (method == "draft") or method == "nasd"


def test_coloured_text_loses_no_character(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    assert main(["run", PROMPT, *pair(models), "--color", "always", "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    head, *steps, end = [json.loads(line) for line in trace.read_text().splitlines()]
    text = "".join(step["text"] for step in steps)
    kept = re.sub("\x1b\\[(31|90);9m.*?\x1b\\[0m", "", shown, flags=re.DOTALL)
    assert re.sub("\x1b\\[[0-9;]*m", "", kept).startswith(PROMPT + text + "\n\n20 tokens")
    assert shown.count("\x1b[32m") == end["metrics"]["accepted"]
    assert shown.count("\x1b[31;9m") == end["metrics"]["tested"] - end["metrics"]["accepted"]
    assert head["exact"] and " exact " in shown


def test_steps_as_text(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", PROMPT, *pair(models), "--steps", "--gamma", "4"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"step 1  position \d+  gamma 4  drafted 4  accepted \d", shown)
    assert re.search(r"Rejected: the draw \S+ is not below p/q = \S+", shown) and "Not tested" in shown
    assert re.search(r"q=\S+  p=\S+", shown) and "correction" in shown


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_steps_end_with_guarantee_and_engine(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for flags, guarantee in (([], "exact"), (["--rule", "top1"], "LOSSY")):
        assert main(["run", PROMPT, *pair(models), "--steps", "--temperature", "1", *flags]) == 0
        *_, figures, engine = capsys.readouterr().out.splitlines()
        assert f"  {guarantee}  end: length" in figures and "engine" in engine


def test_loading_is_one_line_on_a_terminal_and_nothing_elsewhere(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", PROMPT, *pair(models)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr", error := Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["run", PROMPT, *pair(models)]) == 0
    *shown, last = re.split("\r\x1b\\[K", error.getvalue())
    assert any(line.startswith("reading target") for line in shown) and last == ""
    assert all(len(line) < 40 for line in shown) and "\n" not in error.getvalue()


@pytest.mark.parametrize("flags", [[], ["--raw"]])
def test_a_chat_is_shown_without_its_template_unless_raw(
    flags: list[str], models: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = save_model(tmp_path / "chat", byte_level_tokenizer(), num_hidden_layers=1)
    (target / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    arguments = ["--target", str(target), "--method", "ar", "--chat", "--max-tokens", "9", "--seed", "1"]
    texts = []
    for view in (["--json"], flags):
        assert main(["run", "a b", *arguments, *view]) == 0
        texts.append(capsys.readouterr().out)
    answer = "".join(json.loads(line).get("text", "") for line in texts[0].splitlines())
    assert texts[1].startswith(("[a b]" if flags else "") + answer + "\n\n9 tokens")


def test_a_seed_repeats_the_run(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    def tokens(seed: str) -> list[int]:
        assert main(["run", PROMPT, *pair(models), "--seed", seed, "--json"]) == 0
        return [token for line in capsys.readouterr().out.splitlines() for token in json.loads(line).get("tokens", [])]

    assert tokens("5") == tokens("5") != tokens("6")


def test_the_prompt_may_come_from_standard_input(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert main(["run", "-", *pair(models)]) == 0
    assert capsys.readouterr().out.startswith(PROMPT)


BAD = {
    "empty prompt": ([""], "the prompt is empty"),
    "prompt longer than the context": (["x = 1\n" * 200], "shorten it by at least"),
    "gamma 0": ([PROMPT, "--gamma", "0"], "gamma must be from 1 to 64, not 0"),
    "gamma no number": ([PROMPT, "--gamma", "many"], "invalid int value"),
    "surrogate": (["a\udcff"], "the prompt has an invalid character at position 2"),
    "option of another method": ([PROMPT, "--tree-nodes", "5"], "no effect with method draft: choose tree"),
    "threshold of a gate": ([PROMPT, "--remote", "http://a:1", "--gate-nll", "1"], "gate_nll has no effect without"),
    "store of one run": ([PROMPT, "--method", "nasd", "--ngram-keep"], "unrecognized arguments: --ngram-keep"),
    "unknown method": ([PROMPT, "--method", "magic"], "known are draft, eagle, medusa, block, nasd"),
    "removed quantization": ([PROMPT, "--quantization", "fp4-single"], "fp4-single was removed: choose nf4"),
    "removed bandwidth": ([PROMPT, "--up-mbit", "3"], "up_mbit was removed: emulate it with tc netem"),
    "trace that cannot be written": ([PROMPT, "--trace", "/nowhere/at/all"], "cannot write the trace"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(case: str, models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments, sentence = BAD[case]
    try:
        code = main(["run", arguments[0], *pair(models), *arguments[1:]])
    except SystemExit as stop:  # argparse exits directly
        code = stop.code
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert len(error) == 1 and sentence in error[0] and error[0].startswith("specdemo: ")


def test_the_drafter_decodes_alone_if_no_cloud_responds(
    models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    unreachable = ["--remote", "http://127.0.0.1:1"]
    assert main(["run", PROMPT, *pair(models), *unreachable]) == 2
    assert "there is no service at http://127.0.0.1:1" in capsys.readouterr().err
    assert main(["run", PROMPT, *pair(models), *unreachable, "--on-loss", "edge"]) == 0
    shown = capsys.readouterr()
    assert "the drafter decodes alone" in shown.err and "the drafter continues alone" in shown.out
    assert "20 tokens" in shown.out and "LOSSY" in shown.out


@pytest.mark.parametrize(
    ("flags", "provisional"),
    [((), True), (("--mode", "cloud_only"), False), (("--method", "ar"), False), (("--deadline-ms", "900"), True)],
)
def test_the_preset_of_the_guide_commits_provisionally_over_a_link(flags: tuple[str, ...], provisional: bool) -> None:
    arguments = ["run", PROMPT, "--pair", "bundled", "--remote", "http://cloud:8300", *flags]
    chosen = recipe_of_flags(parser().parse_args([*arguments, "--preset", "sources"]))
    assert chosen.cloud.provisional == provisional and chosen.exact != provisional
    assert chosen.cloud.deadline_ms == (900 if "900" in flags else 400)
    assert not recipe_of_flags(parser().parse_args(arguments)).cloud.provisional


def test_a_banned_text_does_not_appear(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "class TestStack(TestCase):\n    def test(self):\n", "--temperature", "0", "--max-tokens", "60"]
    arguments += ["--pair", "bundled"]
    texts = []
    for banned in ([], ["--bad-word", "self"]):
        assert main([*arguments, *banned, "--json"]) == 0
        texts.append("".join(json.loads(line).get("text", "") for line in capsys.readouterr().out.splitlines()))
    assert "self" in texts[0] and "self" not in texts[1]
