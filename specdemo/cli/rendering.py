"""What the terminal prints of a run: its trace, its text in colour, or its rounds in words."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from specdemo.generate import Record

# Colour never stands alone: rejected tokens are struck through, corrections underlined, what no target saw is italic.
STYLES = {
    "accepted": "\x1b[32m",
    "unjudged": "\x1b[33;3m",
    "rejected": "\x1b[31;9m",
    "ignored": "\x1b[90;9m",
    "correction": "\x1b[34;4m",
    "bonus": "\x1b[36;4m",
    "plain": "",
}
RESET = "\x1b[0m"


class Json:
    """The trace as it is."""

    def show(self, record: Record) -> None:
        """One line a record."""
        print(json.dumps(record), flush=True)


class Coloured:
    """Text in colour as it comes, then a summary."""

    def show(self, record: Record) -> None:
        """Print a record's share of the text, or the summary."""
        if "specdemo" in record:
            self._exact = record["exact"]
            print(record["prompt"], end="\n" if record.get("encoder") else "", flush=True)
        elif "i" in record:
            print("".join(spans(record)), end="", flush=True)
        else:
            print(f"\n\n{summary(record['metrics'])}  {'exact' if self._exact else 'LOSSY'}  end: {record['end']}")


class Loading:
    """What is being fetched and read: a line that changes where somebody sees it change, else a line for each thing."""

    def __init__(self) -> None:
        self._shown = ""

    def __call__(self, record: Record | None = None) -> None:
        """Show a phase; None: it is over, and the line is wiped."""
        live = sys.stderr.isatty()
        text = record["text"] if record else ""
        if live and (text or self._shown):
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif text and text.partition(",")[0] != self._shown.partition(",")[0]:
            print(f"{text} ...", file=sys.stderr)
        self._shown = text


def spans(step: Record) -> Iterator[str]:
    """The round's tokens, styled; the drafts that were not kept stand before the correction."""
    accepted = set(step["accepted"])
    kept = len(accepted)
    if step.get("remote", {}).get("lost"):
        yield "[the cloud is lost: the drafter goes on alone]"
    for node, piece in zip(step["accepted"], step["pieces"][:kept], strict=False):
        yield f"{STYLES['unjudged' if step['p'][node] is None else 'accepted']}{piece}{RESET}"
    for node, piece in enumerate(step["draft_text"]):
        if node not in accepted:
            style = STYLES["ignored" if step["beta"][node] is None else "rejected"]
            shown = piece.replace("\n", "\u23ce")  # a rejected line break must not break the line
            yield f"{style}{shown}{RESET}"
    for piece in step["pieces"][kept:]:
        style = STYLES[step["kind"]]
        yield f"{style}{piece}{RESET}" if style else piece


class Rounds:
    """Each round in words: position, gamma, every draft with q, p and its fate, the last token."""

    def show(self, record: Record) -> None:
        """Print one round."""
        if "specdemo" in record:
            self._position = 0 if record.get("encoder") else len(record["prompt_tokens"])
        elif "i" in record:
            print(self._round(record), flush=True)
            self._position += len(record["tokens"])
        else:
            print(f"\n{summary(record['metrics'])}  end: {record['end']}")

    def _round(self, step: Record) -> str:
        accepted = set(step["accepted"])
        lines = [
            f"--- round {step['i']}  position {self._position}  gamma {step['gamma']}  "
            f"drafted {len(step['draft'])}  accepted {len(accepted)} ---"
        ]
        for node, text in enumerate(step["draft_text"]):
            q = 1.0 if step["q"] is None else step["q"][node]
            p, draw = step["p"][node], step["draw"][node]
            if p is None:
                lines.append(f"  {text!r:>16}  q={q:.3f}  {'taken' if node in accepted else 'left'} without a verdict")
                continue
            ratio = min(1.0, p / q) if q else 0.0
            if node in accepted:
                fate = f"accepted: draw {draw:.3f} < {ratio:.3f}" if draw is not None else "accepted: the first choice"
            elif step["beta"][node] is None:
                fate = "not tested: an earlier draft was rejected"
            elif draw is None:
                fate = "rejected: not the first choice"
            else:
                fate = f"rejected: draw {draw:.3f} >= {ratio:.3f}"
            lines.append(f"  {text!r:>16}  q={q:.3f}  p={p:.3f}  min(1,p/q)={ratio:.3f}  {fate}")
        if "pending" in step:
            lines.append(f"  settled {step['text']!r}  best beam goes on {step['pending_text']!r}")
        if step["token"] is not None:
            lines.append(f"  {step['pieces'][-1]!r:>16}  {step['kind']}")
        return "\n".join(lines)


def summary(metrics: Record) -> str:
    """The figures in one line; a dash where there is nothing to divide by."""

    def number(name: str, form: str) -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, form)

    return (
        f"{metrics['tokens']} tokens  {number('tokens_per_second', '.1f')} tokens/s  "
        f"accepted {metrics['accepted']}/{metrics['drafted']} drafted ({number('acceptance_rate', '.0%')})  "
        f"alpha {number('mean_beta', '.2f')}  {number('tokens_per_target_pass', '.2f')} tokens/pass  "
        f"first token {number('ttft_s', '.3f')} s"
    )
