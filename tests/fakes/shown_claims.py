"""Figures that each part of the page may show of a run, and the script that reads the displayed texts."""

import math
import re
import statistics
from collections.abc import Iterator
from typing import Any

from fakes.shown_figures import (
    PARTS,
    Claim,
    LaneFigures,
    Line,
    RunFigures,
    by_target,
    claim,
    ledger_table,
    link_s,
    loss,
)

# Texts with figures by part of the page. Left out: text of the model, prompts, controls, axes of charts, and estimates.
READ = """(roots) => {
    const LEFT_OUT = ".lane, .tok, code, mark, .excerpt, .legend, .switches, .files, select, button, summary, caption,"
        + "input, .charts svg *, #lesson-curve svg *, #chart-whatif table, #rounds, #edge-timeline .axis";
    const BLOCKS = "#status, p, li, tr, td, .time-row, .tile, header, .law, .key, .row > .head, figure";
    const NAMED = "[data-kpi], [data-lane], [data-row], [id]:not([id^=html-], [id^=component-])";
    const blocks = new Map();
    const nameOf = (node) => {
        const at = node.closest(NAMED);
        if (at.dataset.kpi) return `tile ${at.dataset.kpi}`;
        if (at.dataset.lane) return `lane ${at.dataset.lane}`;
        return at.dataset.row ? `axis ${at.dataset.row}` : at.id;
    };
    const add = (node, text) => {
        const block = node.closest(BLOCKS) ?? node;
        blocks.set(block, [...(blocks.get(block) ?? []), text.trim()]);
    };
    for (const root of roots.flatMap((selector) => [...document.querySelectorAll(selector)])) {
        const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
            const { parentElement: parent, textContent: text } = walker.currentNode;
            if (text.trim() && parent.checkVisibility() && !parent.closest(LEFT_OUT)) add(parent, text);
        }
        for (const name of ["aria-label", "aria-valuetext", "title"])
            for (const node of root.querySelectorAll(`[${name}]`))
                if (node.checkVisibility() && !node.closest(LEFT_OUT)) add(node, node.getAttribute(name));
    }
    return [...blocks].map(([block, texts]) => [nameOf(block), texts.join(" ")]).filter(([, text]) => /\\d/.test(text));
}"""
# Ends of the bars and rows of the table of steps, which the browser draws from the records
BARS = """() => [...document.querySelectorAll("#time-rows .time-row")].map((row) =>
    [row.dataset.row, row.querySelector(".run").getAttribute("width") / 1000])"""
ROWS = """() => [...document.querySelectorAll("#rounds tbody tr")].map((row) =>
    [...row.querySelectorAll("td:not(.text)")].map((cell) => cell.textContent))"""


# Simulated, and compared with the run by the test of what-if
ESTIMATES = r"Estimated best: .*? tokens/s\.|With \d+ guess\w* at a time, the estimate is \d+ to \d+ tokens per second"


def without_names(text: str, run: RunFigures) -> str:
    """Remove quoted texts, estimates, and names of models, services and engines."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', " ", text)
    text = re.sub(ESTIMATES, " ", text)
    recipes = [lane.recipe for lane in run.lanes.values()]
    names = [recipe.get(name) for recipe in recipes for name in ("pair", "target", "drafter")]
    names += [(recipe.get("cloud") or {}).get("remote") for recipe in recipes]
    for lane in run.lanes.values():
        names += [lane.header["environment"].get("vectors")]
        names += lane.header["environment"].get("engine", "").split(": ")
    for name in (name for name in names if name and re.search(r"\d", name)):
        text = text.replace(name, " ")
    return text


PART_WORDS = {"draft_s": "guessing", "verify_s": "checking", "host_s": "the rest"}


def titles(run: RunFigures) -> Iterator[Claim]:
    options = {
        "temperature {}": "temperature",
        "top p {}": "top_p",
        "seed {}": "seed",
        "max tokens {}": "max_tokens",
        "gamma {}": "gamma",
        "{} beams": "num_beams",
    }
    yield Claim("up to {} guesses", [(longest_draft(lane.recipe),) for lane in run.lanes.values()])
    for words, name in options.items():
        yield Claim(words, [(lane.recipe[name],) for lane in run.lanes.values() if name in lane.recipe])


def longest_draft(recipe: dict[str, Any]) -> int:
    gamma, limit = recipe["gamma"], recipe.get("gamma_max")
    own = {"dynamic": 12, "heuristic": 20, "auto": 8}.get(recipe.get("policy", "fixed"), 0)
    return gamma if recipe.get("policy", "fixed") == "fixed" else limit or max(own, gamma, recipe.get("gamma_min") or 0)


def first_token(*lanes: LaneFigures) -> Iterator[Claim]:
    yield Claim("{} ms", [(1000 * lane.ttft_s,) for lane in lanes if lane.ttft_s < 1])
    yield Claim("{} s", [(lane.ttft_s,) for lane in lanes if lane.ttft_s >= 1])


def size(words: str, value: float | None) -> Claim:
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, factor = next(((unit, by) for unit, by in units if (value or 0) >= by), ("bytes", 1))
    return claim(f"{words} {{}} {unit}", None if value is None else value / factor)


def speedups(run: RunFigures, *words: str) -> list[Claim]:
    """Claims of a speed-up, which are wrong for every value if the times contradict the passes."""
    shown = run.speedup()
    return [Claim(text, [] if shown is None else [(shown,)]) for text in words]


def headline(run: RunFigures) -> Iterator[Claim]:
    lane, plain = run.first, run.plain
    yield from speedups(
        run,
        "{}× faster with drafts",
        "{}× the speed, slower with drafts",
        "No clear difference: {}×",
        "{}× the speed of the large model alone",
    )
    yield claim("{} tokens in {} runs of the large model after the first, {} tokens per second",
                len(lane.tokens), lane.passes, lane.speed)  # fmt: skip
    yield claim("The large model ran {} times instead of {}.", lane.passes, plain.passes if plain else None)
    yield claim("The large model gave {} tokens per run instead of {}.", lane.tokens_per_pass, 1)
    yield claim("differs at token {}", run.equal(next(iter(run.lanes))) + 1)
    yield from titles(run)
    yield Claim("{}×", [(run.speedup(name),) for name in ("spec", "third", "fourth") if run.speedup(name)])


def advice(run: RunFigures) -> Iterator[Claim]:
    lane, cost = run.first, run.step_cost()
    gain = lane.tokens_per_step / cost if lane.tokens_per_step and cost else None
    yield claim("check gave {} tokens for the time of {} single tokens.", lane.tokens_per_step, cost)
    if gain and cost and gain > 1 and cost > 1:
        yield claim("Slower with more wrong guesses: below {} per check.", cost)
    yield claim("{} of {} guesses were kept", lane.accepted, lane.drafted)
    if run.pass_times:
        rows, single, several = run.pass_times
        yield claim("checking {} tokens costs {} times the time of writing 1.", rows, several / single)
    yield claim("Guessing takes another {}.", run.step_cost("draft_s"))
    yield from loss(run, lane)


def lane_header(run: RunFigures, name: str) -> Iterator[Claim]:
    lane, equal = run.lanes[name], run.equal(name)
    yield claim("At temperature {} rounding", 0)
    yield from titles(run)
    yield claim("{} tok/s", lane.speed)
    yield claim("All {} tokens equal", equal)
    yield claim("differs at token {}", equal + 1)
    yield claim("differ from token {} on", equal + 1)
    yield claim("with filler top-k {}", 1)  # title of a method


def axis(run: RunFigures, name: str, i: int) -> Iterator[Claim]:
    lane = run.lanes[name]
    last, at = len(lane.steps) - 1, lane.at
    yield claim("Step {} of {}, {} s to {} s: {} token", i, last, at[i - 1], at[i], len(lane.steps[i]["tokens"]))
    yield claim("{} steps in {} s", last + (at[0] > 0), at[-1])
    yield from titles(run)
    yield claim("{} s", at[-1])


def pass_costs(run: RunFigures) -> Iterator[Claim]:
    if not run.pass_times:
        return
    rows, single, several = run.pass_times
    words = "Checking {} tokens costs {} times the time of writing 1"
    yield claim(f"{words}, not {{}} times", rows, several / single, rows)
    yield claim(f"{words}.", rows, several / single)
    yield claim("writing 1 {} ms", 1000 * single)
    yield claim("checking {} {} ms", rows, 1000 * several)


def run_table(run: RunFigures) -> Iterator[Claim]:
    """Cells of the table of runs, by its columns."""
    lanes = run.lanes
    yield from titles(run)
    yield claim("{} (baseline)", 1)
    yield Claim("{}× (one run", [(run.speedup(name),) for name in lanes if name != "ar"])
    shares = [share for lane in lanes.values() for share in (lane.acceptance, lane.alpha) if share is not None]
    yield Claim("{} %", [(100 * share,) for share in shares])
    yield from first_token(*lanes.values())
    yield Claim("{}", [(lane.tokens_per_pass,) for lane in lanes.values()])


def tile(run: RunFigures, name: str) -> Iterator[Claim]:
    lane = run.first
    share = lane.acceptance
    match name:
        case "acceptance":
            yield claim("guesses kept {} %", None if share is None else 100 * share)
            yield claim("{} of {} drafted", lane.accepted, lane.drafted)
            yield claim("α {}", lane.alpha)
            yield claim("{} unverified", lane.unverified)
            if estimates_overlap(lane):
                yield claim("mean overlap β {}", lane.overlap)
        case "tokens_per_pass":
            yield claim("tokens / pass {} {} passes", lane.tokens_per_pass, lane.passes)
        case "tokens_per_second":
            yield claim("tokens / s {} {} tokens", lane.speed, len(lane.tokens))
        case "ttft":
            yield from first_token(lane)
        case "memory":
            uses = {
                "weights": lane.weights,
                "KV": lane.memory("kv_bytes"),
                "device": lane.memory("device_bytes"),
                "memory": lane.memory("rss_bytes"),
            }
            yield from (size(words, use) for words, use in uses.items())
        case "speedup":
            yield from speedups(run, "speed-up {}×")


def estimates_overlap(lane: LaneFigures) -> bool:
    """Return True for rules that accept with probability min(p, q) on average."""
    return lane.recipe.get("rule", "rejection") in ("rejection", "block")


def verdict(run: RunFigures) -> Iterator[Claim]:
    yield from causes(run)
    yield from headline(run)
    yield from lane_header(run, next(iter(run.lanes)))
    yield claim("{} thread", run.first.header["environment"].get("threads"))


def causes(run: RunFigures) -> Iterator[Claim]:
    lane, plain = run.first, run.plain
    if plain is None:
        return
    yield claim("{} against {} tokens per second", lane.speed, plain.speed)
    yield claim("{} against {} s in total", lane.at[-1], plain.at[-1])
    per_token = [1000 * each.at[-1] / len(each.tokens) for each in (lane, plain)]
    yield claim("{} against {} ms per token", *per_token)
    yield claim("gave {} tokens for the time of {} (guessing {}, checking {}, the rest {})",
                lane.tokens_per_step, run.step_cost(), *map(run.step_cost, PARTS))  # fmt: skip
    yield from theorem(run)
    if lane.linked:
        yield Claim(
            "{} %", [(100 * sum(map(link_s, each.steps)) / each.steps[-1]["t"],) for each in run.lanes.values()]
        )


def theorem(run: RunFigures) -> Iterator[Claim]:
    lane, draft_cost = run.first, run.step_cost("draft_s")
    steps = len(lane.steps) - 1
    if not draft_cost or not lane.all_drafted or lane.alpha is None:
        return
    drafted = lane.all_drafted / steps
    alpha, name = (lane.overlap, "mean overlap β") if estimates_overlap(lane) else (lane.alpha, "α")
    assert alpha is not None
    tokens = drafted + 1 if alpha == 1 else (1 - alpha ** (drafted + 1)) / (1 - alpha)
    expected = tokens / (1 + draft_cost), tokens / (run.step_cost() or math.nan)
    inputs = alpha, drafted, draft_cost / drafted
    words = f"with the times measured here {{}}× (Theorem {{}}, {name} {{}}, {{}} guesses per check, c {{}})"
    yield claim(f"The theory expects {{}}×, {words}", *expected, 3.8, *inputs)
    yield claim(f"({name} {{}} does not exceed c {{}})", alpha, inputs[-1])


def step_words(lane: LaneFigures, i: int) -> Iterator[Claim]:
    line = lane.steps[i]
    counts = len(line["draft"]), len(line["accepted"]), len(line["tokens"])
    guesses = "guess" if counts[0] == 1 else "guesses"
    yield claim(f"{{}} {guesses}, {{}} kept; {{}} token", *counts)
    yield claim(f"{{}} {guesses}, none kept; {{}} token", counts[0], counts[2])
    yield claim(f"{{}} {guesses}, {{}} added without", counts[0], counts[2])
    yield claim("all beams agree on {} tokens", counts[2])
    yield claim("{} s after the start", lane.at[i])
    yield claim("Guesses allowed: {} at the start, {} now", lane.recipe["gamma"], line["gamma"])
    yield claim("Guesses allowed: {}", line["gamma"])
    for name, value in line.get("policy", {}).items():
        yield claim(f"{name.replace('_', ' ')} {{}}", float(f"{value:.3g}"))
    link = line.get("remote") or {}
    for words, name, scale in (("cloud, ms", "cloud_s", 1000), ("waiting for the link, ms", "rtt_s", 1000),
                               ("requests", "sent", 1), ("bytes up", "bytes_up", 1), ("bytes down", "bytes_down", 1),
                               ("hard", "hard_ratio", 1)):  # fmt: skip
        yield claim(f"{words} {{}}", link.get(name, 0) * scale)


def step_player(lane: LaneFigures, i: int) -> Iterator[Claim]:
    line = lane.steps[i]
    untested = [beta for node, beta in enumerate(line["beta"]) if beta is None and node not in line["accepted"]]
    yield claim("{} kept", len(line["accepted"]))
    yield claim("guessed {} token", len(line["draft"]))
    yield claim("The step gives {} token", len(line["accepted"]) + (line["token"] is not None))
    yield claim("{} guess", len(untested))
    yield from decisions(line)
    yield from masses(line)


def decisions(line: Line) -> Iterator[Claim]:
    nodes = range(len(line["draft"]))
    unknown = [None] * len(nodes)
    p, q, draw = line["p"], line["q"] or unknown, line["draw"]
    quotients = [min(1.0, a / b) if a is not None and b else None for a, b in zip(p, q, strict=True)]
    bound = line.get("bound") or quotients
    tops = [dict(law["top"]) for law in line.get("laws") or []]
    top = [tops[line["parents"][n] + 1] if tops else {} for n in nodes]
    raw = [top[n].get(line["draft"][n]) for n in nodes]  # without the temperature
    best = [max(top[n].values(), default=None) for n in nodes]
    rival = [max((mass for token, mass in top[n].items() if token != line["draft"][n]), default=None) for n in nodes]
    rank = line.get("rank") or [None] * len(nodes)
    entropies = [[law["entropy"] for law in line.get(name) or []] for name in ("laws", "drafted")]
    yield Claim("p/q {};", [(value,) for value in (*bound, *quotients)])  # the quotient, if it was not tested
    yield Claim("p/q ≥ {};", [(1.0,) for n in nodes if p[n] and p[n] >= (q[n] or 1.0)])
    yield Claim("p/q = {}.", [(bound[n],) for n in nodes])
    yield Claim("p/q is at least {}.", [(1.0,) for n in nodes if p[n] and p[n] >= (q[n] or 1.0)])
    yield Claim("accepted below {} · draw {}", [(bound[n], draw[n]) for n in nodes])
    yield Claim("its share {} of", [(bound[n],) for n in nodes])
    yield Claim("the draw {} is", [(draw[n],) for n in nodes])
    yield Claim("draw {}", [(draw[n],) for n in nodes])
    yield Claim("bound {}", [(bound[n],) for n in nodes])
    shares = [[None if mass is None else 100 * mass for mass in masses] for masses in (raw, rival, best)]
    for n, name in enumerate(("first choice", "second choice", "third choice"), 1):
        ranked = [node for node in nodes if rank[node] == n]
        other, words = (1, "second") if n == 1 else (2, "first")
        figures = [(shares[0][node], shares[other][node]) for node in ranked]
        yield Claim(f"{name} ({{}} %); the {words} had {{}} %", figures)
    yield Claim("choice {} ({} %); the first had {} %", [(rank[n], shares[0][n], shares[2][n]) for n in nodes])
    yield Claim(
        "large model choice {} · its p {} · p of its first choice {}", [(rank[n], raw[n], best[n]) for n in nodes]
    )
    yield Claim("choice number {}, with {} against {}.", [(rank[n], raw[n], best[n]) for n in nodes])
    yield Claim("p {} · q {}", [(p[n], q[n]) for n in nodes])
    yield Claim("p {}, q {}", [(p[n], q[n]) for n in nodes])
    yield Claim("p {}", [(p[n],) for n in nodes])
    yield Claim("β {}", [(line["beta"][n],) for n in nodes])
    for name, values in zip("pq", entropies, strict=True):
        yield Claim(f"H({name}) {{}}", [(value,) for value in values])
    origins = line.get("origin") or [{}]
    for words, name in (("match of {} tokens", "matched"), ("order {}", "order"), ("seen {}×", "count")):
        yield Claim(words, [(origin.get(name),) for origin in origins])
    yield Claim("the last {} token", [(origin.get("matched") or (origin.get("order") or 0) - 1,) for origin in origins])
    yield Claim("It occurred {} time", [(origin.get("count"),) for origin in origins])


def masses(line: Line) -> Iterator[Claim]:
    """Bars of the recorded distributions, and of the mass that was not recorded."""
    tops = recorded_tops(line)
    recorded = [mass for top in tops for _, mass in top]
    nothing = [0.0, *([1.0] if line["q"] is None else [])]  # point masses
    known = {*recorded, *nothing, *(max(0.0, 1 - sum(mass for _, mass in top)) for top in tops), *others(line)}
    yield Claim("{} {}", [(a, b) for a in known for b in known])
    yield Claim("{}", [(mass,) for mass in known])


def recorded_tops(line: Line) -> list[Any]:
    tops = [law["top"] for name in ("laws", "drafted") for law in line.get(name) or []]
    return [*tops, line["token_top"]["top"]] if line.get("token_top") else tops


def others(line: Line) -> Iterator[float]:
    """Mass of the tokens without a bar of their own, for each number of bars."""
    for top in recorded_tops(line):
        ordered = sorted((mass for _, mass in top), reverse=True)
        yield from (1 - sum(ordered[:count]) for count in range(len(ordered)))


def charts(lane: LaneFigures) -> Iterator[Claim]:
    yield Claim("{}: {} %", [(k, 100 * passed / tried) for k, (passed, tried) in enumerate(lane.positions, 1)])
    for part in PARTS:
        name, total = PART_WORDS[part], 1000 * lane.total(part)
        yield Claim(f"{name} {{}} ms", [(total,), (total / (len(lane.steps) - 1),)])
    yield claim("Measured (+): {} guesses, {} tokens/s", lane.recipe["gamma"], lane.speed)
    yield claim("Measured: {} tokens/s", lane.speed)


def step_rows(lane: LaneFigures) -> list[list[float | str | None]]:
    rows: list[list[float | str | None]] = []
    for line, at in zip(lane.steps, lane.at, strict=True):
        betas = [beta for beta in line["beta"] if beta is not None]
        counts = len(line["draft"]), len(betas), len(line["accepted"]) if by_target(line) else 0, len(line["tokens"])
        times = (1000 * line[part] for part in PARTS)
        overlap = statistics.fmean(betas) if betas else None
        kind = line["kind"] if by_target(line) else "unverified"
        gamma = None if lane.recipe["method"] in ("ar", "beam") else line["gamma"]
        rows.append([line["i"], at, gamma, *counts, kind, overlap, *times])
    return rows


def edge_words(lane: LaneFigures) -> Iterator[Claim]:
    links = [line["remote"] for line in lane.steps]
    total = lane.steps[-1]["t"]
    sums = {name: sum(link.get(name, 0.0) for link in links) for name in ("escalated", "bytes_up", "bytes_down")}
    yield claim("{} tokens in {} steps, {} tokens per second", len(lane.tokens), len(lane.steps), lane.speed)
    yield claim("{} % of the steps queried the cloud", 100 * sums["escalated"] / len(links))
    yield claim("{} kB up and {} kB down", sums["bytes_up"] / 1000, sums["bytes_down"] / 1000)
    yield claim("{} measured", (sums["bytes_up"] + sums["bytes_down"]) / len(lane.tokens))
    yield from titles(RunFigures({"spec": lane}))
    known = [line for line in lane.steps if "cloud_s" in line["remote"]]
    unknown = [line for line in lane.steps if "cloud_s" not in line["remote"]]
    spent = {
        "drafting": lane.total("draft_s") + lane.steps[0]["draft_s"],
        "sending": sum(line["remote"]["up_s"] for line in known),
        "receiving": sum(line["remote"]["down_s"] for line in known),
        "cloud's pass": sum(line["remote"]["cloud_s"] for line in known),
        "waiting": sum(line["verify_s"] for line in unknown),
    }
    spent["link delay"] = sum(line["verify_s"] for line in known) - spent["sending"] - spent["receiving"]
    spent["link delay"] -= spent["cloud's pass"]
    link = sum(spent[name] for name in ("sending", "receiving", "waiting", "link delay"))
    spent["idle"] = total - sum(spent.values())
    yield claim("The link took {} % of it", 100 * link / total)
    for name, value in spent.items():
        yield claim(f"{name} {{}} %", 100 * value / total)
    k = max(len(line["draft"]) for line in lane.steps)
    yield claim("{} ids, {} probabilities, 1 of q × {}, and 8 down", k, k, lane.header["vocab_size"])
    yield claim("At most {} per token", 4 * k + 4 * k + 4 * lane.header["vocab_size"] + 8)


def edge_marks(lane: LaneFigures) -> Iterator[Claim]:
    yield Claim("Steps {} to {} over time", [(0, len(lane.steps) - 1)])
    yield Claim(
        "{}: {}/{}", [(line["i"], len(line["accepted"]) * by_target(line), len(line["draft"])) for line in lane.steps]
    )
    starts = [0.0]
    for line in lane.steps:
        starts.append(line["t"])
    names = ("draft_s", "verify_s")
    known = [line[name] for line in lane.steps for name in names]
    for line in lane.steps:
        link = line["remote"]
        if "cloud_s" in link:
            way = (line["verify_s"] - link["cloud_s"] - link["up_s"] - link["down_s"]) / 2
            known += [link["cloud_s"], link["up_s"], link["down_s"], way]
    known += [after - before - line["draft_s"] - line["verify_s"]
              for before, after, line in zip(starts, starts[1:], lane.steps, strict=False)]  # fmt: skip
    yield Claim(": {} ms", [(1000 * value,) for value in known])


def edge_model(lane: LaneFigures) -> Iterator[Claim]:
    """The model of a step over the link, from the steps that the cloud verified in time."""
    verified = [line for line in lane.steps[1:] if line["draft"] and "cloud_s" in line["remote"]]
    count, drafted = len(verified), sum(len(line["draft"]) for line in verified)
    c = sum(line["draft_s"] for line in verified) / drafted
    v = sum(line["remote"]["cloud_s"] for line in verified) / count
    link = sum(line["verify_s"] + line["host_s"] for line in verified) / count - v
    alpha = lane.overlap or 0.0
    speeds = {k: (1 - alpha ** (k + 1)) / (1 - alpha) / (v + k * c + link) for k in [*range(25), drafted / count]}
    best = max(range(25), key=speeds.__getitem__)
    yield claim("E[tokens] = ({} − α^(k+{})) / ({} − α)", 1, 1, 1)
    yield claim("mean overlap β {} for α", alpha)
    yield claim("a draft token, {} ms", 1000 * c)
    yield claim("a cloud pass, {} ms", 1000 * v)
    yield claim("link and host {} ms", 1000 * link)
    yield claim("The run's k of {} predicts {}", drafted / count, speeds[drafted / count])
    yield claim("after the first token: {}", lane.decode_tokens / lane.decode_s)
    yield claim("The best k is {} , with {}", best, speeds[best])


def memory_rows(run: RunFigures) -> Iterator[Claim]:
    sizes = [
        lane.header["environment"].get(name)
        for lane in run.lanes.values()
        for name in ("target_bytes", "drafter_bytes")
    ]
    uses = [line["memory"] for lane in run.lanes.values() for line in lane.steps if "memory" in line]
    sizes += [use[name] for use in uses for name in ("rss_bytes", "kv_bytes", "device_bytes")]
    yield from titles(run)
    yield Claim(
        "{} %", [(100 * (kv := lane.memory("kv_bytes") or 0) / (lane.weights + kv),) for lane in run.lanes.values()]
    )
    yield Claim("{}", [(size / 1e6,) for size in sizes if size is not None])


def chat_line(run: RunFigures) -> Iterator[Claim]:
    yield claim("{} tok/s", run.first.speed)
    yield claim("{} % accepted", None if run.first.acceptance is None else 100 * run.first.acceptance)
    yield from speedups(run, "{}× the baseline")


def displayed_part(lane: LaneFigures, shown: int) -> Iterator[Claim]:
    """Tiles while the first `shown` steps are displayed."""
    part = LaneFigures(lane.header, lane.steps[:shown], lane.linked)
    yield from tile(RunFigures({"spec": lane}), "memory")
    yield claim("guesses kept {} %", 100 * (part.acceptance or 0))
    yield claim("{} of {} drafted", part.accepted, part.drafted)
    yield claim("tokens / pass – {} steps", 0)
    yield claim("tokens / pass {} {} steps", part.tokens_per_step, shown - 1)
    seconds = round(part.at[-1], 6)  # as sent to the browser
    rate = (len(part.tokens) if part.linked else part.decode_tokens) / seconds if seconds else None
    yield claim("tokens / s {} {} tokens displayed", rate, len(part.tokens))
    yield from first_token(lane)


def claims(run: RunFigures, part: str, i: int) -> list[Claim]:
    """Return the claims of a part of the page, while it shows step `i` of the first lane."""
    name, lane = next(iter(run.lanes.items()))
    line = lane.steps[i]
    kind, _, of = part.partition(" ")
    counts = [float(len(each.tokens)) for each in run.lanes.values()]
    known = {
        "status": lambda: [claim(f"trace, {' and '.join(['{}'] * len(counts))} tokens", *counts)],
        "headline": lambda: headline(run),
        "advice": lambda: advice(run),
        "lane": lambda: lane_header(run, of),
        "axis": lambda: axis(run, of, i),
        "time-words": lambda: axis(run, name, i),
        "pass-costs": lambda: pass_costs(run),
        "race-clock": lambda: [claim("{} s", run.end)],
        "race-lengths": lambda: [claim(f"({' and '.join(['{}'] * len(counts))} tokens)", *counts)],
        "run-table": lambda: run_table(run),
        "recorded-settings": lambda: titles(run),
        "tile": lambda: tile(run, of),
        "verdict": lambda: verdict(run),
        "figures": lambda: charts(lane),
        "chart-times": lambda: charts(lane),
        "ledger": lambda: ledger_table(run, lane),
        "chart-whatif": lambda: charts(lane),
        "inspector": lambda: [Claim("tep {} of {}", [(i, len(lane.steps) - 1)])],
        "round-words": lambda: step_words(lane, i),
        "player": lambda: step_player(lane, i),
        "round-source": lambda: decisions(line),
        "round-tree": lambda: [
            claim("of {} tokens, {} of", len(line["draft"]), len(line["accepted"])),
            *decisions(line),
        ],
        "round-times": lambda: [claim(f"{words} {{}} ms", 1000 * line[part]) for part, words in PART_WORDS.items()],
        "edge-run": lambda: edge_words(lane),
        "edge-timeline": lambda: edge_marks(lane),
        "edge-best": lambda: edge_model(lane),
        "memory-run": lambda: memory_rows(run),
    }
    if kind.startswith(("node-", "round-nodes")):
        return [*decisions(line), *masses(line)]
    assert kind in known, f"no claims about {part}"
    return [*known[kind]()]
