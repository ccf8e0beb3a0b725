"""The interactive terminal: answers, commands, errors and the ends of a session."""

import re
import signal
from collections.abc import Callable, Iterator

import pytest
from fakes.tiny_models import TEMPLATE, byte_level_tokenizer, save_model
from fakes.traces import text_of

from specdemo.cli import main
from specdemo.generate import generate
from specdemo.models.zoo import PAIRS, Pair
from specdemo.recipe import Recipe

pytestmark = pytest.mark.slow

MESSAGE = "for i in range(10):"
SPEED = r"\[{}: \d+ tokens, [\d.-]+ tokens/s, [\d.-]+ tokens/pass(?:, accepted .* of drafts)?\]"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "target", byte_level_tokenizer(TEMPLATE)))


@pytest.fixture
def typed(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def enter(*lines: str | type[BaseException], flags: tuple[str, ...] = ("--chat",)) -> tuple[int, str, str]:
        waiting = iter(lines)

        def next_line(prompt: str) -> str:
            line = next(waiting, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", next_line)
        common = ["--target", target, "--device", "cpu", "--temperature", "0", "--max-tokens", "8"]
        code = main(["chat", *common, "--method", "nasd", *flags])
        return (code, *capsys.readouterr())

    return enter


def test_answers_continue_the_conversation(target: str, typed: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = typed(MESSAGE, "", "Why?", "/quit", "not read")
    recipe = Recipe(target=target, method="nasd", temperature=0, max_tokens=8, device="cpu", chat=True)
    messages = [{"role": "user", "content": MESSAGE}]
    first = text_of(generate(recipe, messages))
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Why?"}]
    second = text_of(generate(recipe, messages))
    assert code == 0 and f"{first}\n[nasd: " in out and f"{second}\n[nasd: " in out
    assert len(re.findall(SPEED.format("nasd"), out)) == 2


def test_commands_change_method_and_gamma_and_compare_with_ar(typed: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = typed(MESSAGE, "/gamma 2", "/method suffix", "Why?", "/compare", "/help")
    assert code == 0 and not [line for line in err.splitlines() if line.startswith("specdemo: unknown")]
    assert "method nasd, gamma 2," in out and "method suffix, gamma 2," in out
    assert re.search(SPEED.format("suffix"), out) and re.search(SPEED.format("ar"), out)
    assert re.search(r"suffix decodes [\d.]+ times as fast as ar", out)
    assert "/method NAME" in out and "lookahead" in out


def test_a_session_survives_wrong_commands_until_its_input_ends(
    typed: Callable[..., tuple[int, str, str]],
) -> None:
    wrong = {
        "/nope": "unknown command 'nope': known are method, gamma, pair, compare, help, quit",
        "/method magic": "unknown method 'magic'",
        "/method draft": "method draft needs a drafter",
        "/gamma many": "gamma must be a number like 4, not 'many'",
        "/gamma 99": "gamma must be from 1 to 64, not 99",
        "/pair magic": "unknown pair 'magic'",
        "/compare": "there is no answer to compare: write a message first",
    }
    assert typed()[0] == 0 and typed(KeyboardInterrupt)[0] == 130
    code, out, err = typed(*wrong, MESSAGE)
    assert code == 0 and re.search(SPEED.format("nasd"), out)
    assert all(sentence in err for sentence in wrong.values())


def test_a_pair_starts_a_new_conversation_with_its_settings(
    target: str, typed: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PAIRS, "other", Pair("Other pair", target, target, 5, method="draft", temperature=0.25))
    code, out, _ = typed(MESSAGE, "/pair other", "def f(x):", "/method ar", "/gamma 3")
    assert code == 0 and "Other pair; method draft, gamma 5, temperature 0.25" in out
    assert re.search(SPEED.format("draft"), out) and "method ar, temperature" in out


@pytest.mark.parametrize(("number", "code", "answers"), [(signal.SIGINT, 0, 3), (signal.SIGTERM, 130, 1)])
def test_an_interrupt_ends_the_answer_only_and_a_termination_the_session(
    number: signal.Signals,
    code: int,
    answers: int,
    monkeypatch: pytest.MonkeyPatch,
    typed: Callable[..., tuple[int, str, str]],
) -> None:
    """Two answers are interrupted, so a second signal does not end the process."""
    calls: list[int] = []

    def interrupted(*arguments: object) -> Iterator[object]:
        calls.append(len(calls))
        if len(calls) < 3:
            signal.raise_signal(number)
        yield from generate(*arguments)

    monkeypatch.setattr("specdemo.cli.chat.generate", interrupted)
    ended, out, _ = typed(MESSAGE, "Why?", "How?")
    assert ended == code and len(calls) == answers
    assert bool(re.search(SPEED.format("nasd"), out)) == (code == 0)
