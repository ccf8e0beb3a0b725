"""Terminal commands: output, exit codes, files, one clear sentence for each kind of invalid input, proof bundles."""

import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.engine_server import engine_server, llama_events
from fakes.forked_process import ForkedProcess, terminal, terminal_with_full_disk
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.bench.equality import DecodedText, EqualityResult
from specdemo.cli import main
from specdemo.cli import run as run_module
from specdemo.cli.arguments import parser
from specdemo.cli.run import OutputFile, recipe_of_flags
from specdemo.core.events import End, StepEvent
from specdemo.external.dialects import NO_DRAFT, reported_step
from specdemo.models.zoo import PAIRS
from specdemo.native import build
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe, plan_run

pytestmark = pytest.mark.slow

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "target": str(save_model(root / "target", byte_level_tokenizer())),
        "drafter": str(save_model(root / "drafter", byte_level_tokenizer(), seed=1, num_hidden_layers=1)),
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


def test_the_ledger_follows_the_run_or_its_trace(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for output in ([], ["--json"]):
        assert main(["run", PROMPT, *pair(models), *output, "--ledger"]) == 0
        shown = capsys.readouterr()
        text = shown.err if output else shown.out
        wall = re.search(r"^wall time ([\d.]+) ms$", text, re.MULTILINE)
        parts = re.findall(r"^  \D+([\d.]+) ms +(\d+) %", text, re.MULTILINE)
        assert wall and sum(float(ms) for ms, _ in parts) == pytest.approx(float(wall[1]), rel=0.02)
        assert sum(int(share) for _, share in parts) == pytest.approx(100, abs=len(parts))
        assert re.search(r"^largest extra cost: [a-z ]+, [\d.]+ ms per step$", text, re.MULTILINE)
        assert all(line.startswith("{") for line in shown.out.splitlines()) or not output


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


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


def test_a_chat_is_shown_without_its_template_unless_raw(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message may come from standard input."""
    target = save_model(tmp_path / "chat", byte_level_tokenizer(), num_hidden_layers=1)
    (target / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    arguments = ["--target", str(target), "--method", "ar", "--chat", "--max-tokens", "9", "--seed", "1"]
    texts = []
    for view in (["--json"], [], ["--raw"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("a b"))
        assert main(["run", "-", *arguments, *view]) == 0
        texts.append(capsys.readouterr().out)
    answer = "".join(json.loads(line).get("text", "") for line in texts[0].splitlines())
    assert texts[1].startswith(answer + "\n\n9 tokens") and texts[2].startswith("[a b]" + answer + "\n\n9 tokens")


def refusal(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence of a refused command."""
    try:
        code = main([*arguments])
    except SystemExit as stop:  # argparse exits directly
        code = stop.code
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and sentence.startswith("specdemo: ")
    return sentence


BAD: list[tuple[list[str], str]] = [
    ([""], "the prompt is empty"),
    (["x = 1\n" * 200], "shorten it by at least"),
    ([PROMPT, "--gamma", "many"], "invalid int value"),
    (["a\udcff"], "the prompt has an invalid character at position 2"),
    ([PROMPT, "--tree-nodes", "5"], "no effect with method draft: choose tree"),
    ([PROMPT, "--remote", "http://a:1", "--gate-nll", "1"], "gate_nll has no effect without"),
    ([PROMPT, "--method", "nasd", "--ngram-keep"], "unrecognized arguments: --ngram-keep"),
    ([PROMPT, "--method", "magic"], "known are draft, eagle, medusa, block, nasd"),
    ([PROMPT, "--quantization", "fp4-single"], "fp4-single was removed: choose nf4"),
    ([PROMPT, "--up-mbit", "3"], "up_mbit was removed: emulate it with tc netem"),
    ([PROMPT, "--trace", "/nowhere/at/all"], "cannot write the trace"),
]
SERVE = {
    "--port 70000": "cannot listen on",
    f"--key {__file__}": "key has no effect without --certificate",
    f"--certificate {__file__}": "is unusable",
    "--queue 0": "--queue: must be at least 1, not 0",
    "--max-replicas 2": "have no effect without --ray",
    "--ray --min-replicas 3 --max-replicas 2": "min-replicas must be from 1 to max-replicas",
    "--ray --connections 9": "have no effect with --ray",
    "--ray": "package ray is not installed: install",
}


def test_bad_input_gets_one_sentence(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for (prompt, *flags), sentence in BAD:
        assert sentence in refusal(["run", prompt, *pair(models), *flags], capsys)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "specdemo.cli.ray_serve", raising=False)
    for serve_flags, sentence in SERVE.items():
        assert sentence in refusal(["serve", *serve_flags.split()], capsys)


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


def test_the_preset_of_the_guide_commits_provisionally_over_a_link() -> None:
    arguments = ["run", PROMPT, "--pair", "bundled", "--remote", "http://cloud:8300"]
    assert not recipe_of_flags(parser().parse_args(arguments)).cloud.provisional
    for flags, provisional, deadline_ms in (
        ((), True, 400),
        (("--mode", "cloud_only"), False, 400),
        (("--method", "ar"), False, 400),
        (("--deadline-ms", "900"), True, 900),
    ):
        chosen = recipe_of_flags(parser().parse_args([*arguments, *flags, "--preset", "sources"]))
        assert chosen.cloud.provisional == provisional and plan_run(chosen).exact != provisional
        assert chosen.cloud.deadline_ms == deadline_ms


# --- output files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ar(models: dict[str, str]) -> list[str]:
    return ["--target", models["target"], "--method", "ar", "--device", "cpu", "--max-tokens", "20"]


def test_a_failed_run_leaves_the_earlier_file_and_a_link_is_followed(tmp_path: Path) -> None:
    path, link = tmp_path / "trace.jsonl", tmp_path / "link"
    path.write_text("earlier")
    link.symlink_to(path)
    with pytest.raises(KeyError), closing(OutputFile(path, "the trace")):
        raise KeyError("before the first line")
    assert path.read_text() == "earlier" and sorted(os.listdir(tmp_path)) == ["link", "trace.jsonl"]
    with closing(OutputFile(link, "the trace")) as file:
        file.write("later")
        assert path.read_text() == "earlier"
    assert path.read_text() == "later" and link.is_symlink() and len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(
    ("failure", "code", "end"), [(KeyboardInterrupt, 130, "cancelled"), (ZeroDivisionError, None, "error")]
)
def test_an_interrupted_run_is_marked_in_its_trace(
    failure: type[BaseException],
    code: int | None,
    end: str,
    ar: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, real = tmp_path / "trace.jsonl", run_module.generate

    def failing(*given: object) -> Iterator[object]:
        for event in real(*given):
            yield event
            if isinstance(event, StepEvent) and event.step.i == 2:
                raise failure("broken")

    monkeypatch.setattr(run_module, "generate", failing)
    command = ["run", PROMPT, *ar, "--trace", str(path)]
    if code is None:
        with pytest.raises(failure):
            main(command)
    else:
        assert main(command) == code
    header, *steps, last = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert "specdemo" in header and len(steps) == 3 and last["metrics"]["steps"] == 3
    assert (last["end"], last["error"]) == (end, "interrupted" if code else "broken")


def test_a_full_disk_for_trace_or_output_ends_the_run_with_a_sentence(ar: list[str], tmp_path: Path) -> None:
    full, path = Path("/dev/full"), tmp_path / "trace.jsonl"
    run = ["run", PROMPT, *ar]
    becomes_full = ForkedProcess(terminal_with_full_disk, 4096, *run, "--trace", str(path))
    processes = {becomes_full: f"the trace to {path}: File too large"}
    if full.exists():
        at_once = ForkedProcess(terminal, *run, "--trace", str(full))
        output = ForkedProcess(terminal, *run, "--json", output=full)
        processes |= {at_once: f"the trace to {full}: No space left on device"}
        processes |= {output: "the output: No space left on device"}
    for process, problem in processes.items():
        _, errors = process.communicate()
        assert process.wait() == 2 and "Traceback" not in errors
        assert errors.splitlines()[-1] == f"specdemo: cannot write {problem}: free some space"
    assert os.listdir(tmp_path) == [] and (full.is_char_device() or not full.exists())


def test_a_directory_without_write_access(ar: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """/proc is read-only for root, too; a bench is refused before it measures."""
    bench = ["bench", *ar[:2], "--method", "nasd", "--device", "cpu", "--output"]
    for command in (["run", PROMPT, *ar, "--trace"], bench):
        assert main([*command, "/proc/specdemo.out"]) == 2
        shown = capsys.readouterr()
        assert not shown.out and "cannot write the " in (last := shown.err.splitlines()[-1])
        assert last.endswith(": choose a writable directory")


def test_characters_that_the_terminal_cannot_encode_are_escaped(ar: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, shown in (("latin-1", "\\u732b é"), ("ascii", "\\u732b \\xe9"), ("utf-8", "猫 é")):
        output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["run", "# 猫 é", *ar]) == 0
        output.flush()
        assert shown in output.buffer.getvalue().decode(encoding)


# --- proof bundles ----------------------------------------------------------------------------------------------------

PROVE = ["--pair", "bundled", "--prompts", "2", "--max-tokens", "8", "--method", "draft", "--gamma", "2"]
Bundle = dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proofs") / "bundle.json"
    assert main(["prove", *PROVE, "--temperature", "0", "0.7", "--bundle", str(path)]) == 0
    return path


def loaded(path: Path) -> Bundle:
    bundle: Bundle = json.loads(path.read_text("utf-8"))
    return bundle


def signed(bundle: Bundle) -> Bundle:
    """Return the bundle with the digest of its content, computed as the document describes it."""
    content = {name: value for name, value in bundle.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "digest": hashlib.sha256(text.encode()).hexdigest()}


def check(path: Path, bundle: Any, *flags: str) -> int:
    changed = path.with_name("changed.json")
    changed.write_text(bundle if isinstance(bundle, str) else json.dumps(bundle), "utf-8")
    return main(["check-bundle", str(changed), "--pair", "bundled", *flags])


def test_a_bundle_names_what_decoded_and_repeats(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = loaded(written)
    assert bundle["software"]["specdemo"].keys() == {"version", "engine", "numerics"}
    weights = Path(PAIRS["bundled"].target) / "model.safetensors"
    assert bundle["files"]["target/model.safetensors"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert {name.partition("/")[0] for name in bundle["files"]} == {"target", "drafter"}
    assert [(run["engine"], run["options"]["rule"]) for run in bundle["runs"]] == [
        ("specdemo", "rejection"),
        ("specdemo", "coupled"),
    ]
    for text in (text for run in bundle["runs"] for text in run["texts"]):
        assert text["ids"] == text["reference_ids"] and len(text["ids"]) == 8 and text["difference"] is None
    assert signed(bundle) == bundle
    assert check(written, bundle) == 0
    assert "4 texts repeated, 0 of them" in capsys.readouterr().out


def text_of(bundle: Bundle) -> Bundle:
    text: Bundle = bundle["runs"][0]["texts"][0]
    return text


Alter = Callable[[Bundle], Any]
ALTERED: dict[str, Alter] = {
    "form": lambda bundle: bundle.update(proof_bundle=2),
    "version": lambda bundle: bundle["software"]["specdemo"].update(version="9"),
    "options": lambda bundle: bundle["runs"][0]["options"].update(gamma=3),
    "prompt ids": lambda bundle: text_of(bundle)["prompt_ids"].pop(),
    "missing": lambda bundle: bundle.pop("files"),
    "unknown": lambda bundle: bundle.update(more=1),
    "type": lambda bundle: text_of(bundle).update(ids=["1"]),
    "digest": lambda bundle: bundle.update(digest="0" * 64),
    "no digest": lambda bundle: bundle.pop("digest"),
}
INCONSISTENT: dict[str, tuple[Alter, str]] = {  # although the digest is valid
    "difference": (lambda bundle: text_of(bundle).update(difference=1), "contradicts the ids"),
    "ids": (lambda bundle: text_of(bundle)["ids"].append(7), "contradicts the ids"),
    "reference ids": (lambda bundle: text_of(bundle)["reference_ids"].insert(0, 7), "contradicts the ids"),
    "margin": (lambda bundle: text_of(bundle).update(margin=0.5), "contradicts the ids"),
    "prompt": (lambda bundle: text_of(bundle).update(prompt="x"), "different prompts"),
    "file": (lambda bundle: bundle["files"].update({"target/config.json": "0" * 64}), "target/config.json"),
    "engine": (lambda bundle: bundle["runs"][0].update(engine="vllm"), "--external"),
    "path": (lambda bundle: bundle["runs"][0]["options"].update(target="/etc/passwd"), "unknown option 'target'"),
    "value": (lambda bundle: bundle["runs"][0]["options"].update(gamma=9999), "gamma must be from 1 to 64"),
}


@pytest.mark.parametrize("name", [*ALTERED, *INCONSISTENT])
def test_an_altered_or_inconsistent_bundle_is_refused(
    written: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = loaded(written)
    alter, words = INCONSISTENT.get(name) or (ALTERED[name], "")
    alter(bundle)
    assert check(written, bundle) == 2 and capsys.readouterr().err.count("\n") == 1
    if words:
        assert check(written, signed(bundle)) == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"digest": NaN}', "null", "1" * 5000, '{"a": "\\ud800"}']
)
def test_other_files_are_refused_in_a_sentence(written: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(written, text) == 2
    error = capsys.readouterr().err
    assert "proof bundle" in error and error.count("\n") == 1


def test_other_texts_differ_in_the_repetition(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = loaded(written)
    text = text_of(bundle)
    text["ids"] = text["reference_ids"] = [7, *text["ids"][1:]]
    assert check(written, signed(bundle)) == 1
    printed = capsys.readouterr().out
    assert "text 0 of specdemo" in printed and "1 of them with other ids" in printed


def test_the_text_of_a_server_is_proved_with_margins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, flags = tmp_path / "served.json", ["--temperature", "0", "--prompts", "1"]
    with engine_server() as server:
        served = ["--external", server.external]
        assert main(["prove", *PROVE, *flags, "--bundle", str(path)]) == 0
        expected = text_of(loaded(path))["reference_ids"]
        server.events = llama_events([*expected[:5], expected[5] + 1, *expected[6:]], 2)
        assert main(["prove", *PROVE, *flags, *served, "--bundle", str(path)]) == 1
        assert "| llama.cpp |" in capsys.readouterr().out
        bundle = loaded(path)
        (text,) = bundle["runs"][1]["texts"]
        assert (text["difference"], text["margin"]) == (5, 1.0) and text["reference_margin"] > 0
        assert server.probes[0] == [*text["prompt_ids"], *expected[:5]]
        assert bundle["software"]["llama.cpp"] == {"version": "b123-abc"}
        assert server.url not in path.read_text("utf-8")
        assert check(path, bundle, *served) == 0
        assert check(path, bundle) == 2 and "give its server" in capsys.readouterr().err
        text["margin"] = 3.0
        assert check(path, signed(bundle), *served) == 1


def test_a_server_that_stops_need_not_report_the_end_token() -> None:
    reference = DecodedText([1], [reported_step(0, 0.0, [4, 5, 2], NO_DRAFT)], End("stop"))
    run = replace(reference, steps=[reported_step(0, 0.0, [4, 5], NO_DRAFT)])
    result = EqualityResult(Recipe(pair="bundled", external="llama.cpp=http://127.0.0.1:9"))
    result.add(Prompt("", "", "x"), run, reference)
    result.add(Prompt("", "", "x"), replace(run, end=End("length")), reference)
    assert [text.difference for text in result.proved] == [None, 2]
