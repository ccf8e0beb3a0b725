"""Proof bundles: written, checked, altered and repeated."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.engine_server import engine_server, llama_events

from specdemo.bench.equality import DecodedText, EqualityResult
from specdemo.cli import main
from specdemo.core.events import End
from specdemo.external.dialects import NO_DRAFT, reported_step
from specdemo.models.zoo import PAIRS
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

COMMON = ["--pair", "bundled", "--prompts", "2", "--max-tokens", "8", "--method", "draft", "--gamma", "2"]
Bundle = dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proofs") / "bundle.json"
    assert main(["prove", *COMMON, "--temperature", "0", "0.7", "--bundle", str(path)]) == 0
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
        assert main(["prove", *COMMON, *flags, "--bundle", str(path)]) == 0
        expected = text_of(loaded(path))["reference_ids"]
        server.events = llama_events([*expected[:5], expected[5] + 1, *expected[6:]], 2)
        assert main(["prove", *COMMON, *flags, *served, "--bundle", str(path)]) == 1
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
