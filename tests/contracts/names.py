"""Collect every external name of the program as nested dictionaries and lists of names."""

import hashlib
import json
import re
import struct
import sys
from collections.abc import Iterable
from typing import Any

from websockets.sync.client import connect

from . import traces
from .interfaces import ROOT, Page, Service, limit_variables, listed, preflight, script, terminal

# Names that no quick request shows; each must remain a quoted constant somewhere in the sources.
CONSTANTS = ("slow", "gone", "alive", "why", "SPECDEMO_TOKEN", "cancelled", "stop", "lost", "edge", "remote")
SOURCES = ("app.py", "specdemo", "benchmarks", "training")


def missing(golden: Any, current: Any, path: str = "") -> list[str]:
    """Names of `golden` that `current` lacks. Additional names are allowed."""
    if isinstance(golden, dict):
        if not isinstance(current, dict):
            return [path]
        return [one for key, value in golden.items() for one in missing(value, current.get(key), f"{path}/{key}")]
    if isinstance(golden, list):
        return [f"{path}/{one}" for one in golden if one not in (current or ())]
    return [] if golden == current else [f"{path} is {current!r}, not {golden!r}"]


# --- terminal --------------------------------------------------------------------------------------------------


def commands(*_: Any) -> dict[str, Any]:
    names = re.search(r"\{([\w,-]+)\}", terminal("--help")[1]).group(1).split(",")
    return {name: _arguments(terminal(name, "--help")[1]) for name in names}


def _arguments(text: str) -> dict[str, str]:
    """Positional arguments and flags of a help text; a flag takes zero, one or several values."""
    usage = re.sub(r"\s+", " ", text.partition("\n\n")[0])
    found = dict.fromkeys(re.findall(r" (\w+)$", usage), "positional")
    for flag in re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE):
        value = re.search(re.escape(flag) + r"(?: \| --no-[\w-]+)?(?: ([A-Z_]+)( \[[A-Z_]+ \.\.\.\])?)?[\]) ]", usage)
        found[flag] = "switch" if not value or not value.group(1) else "values" if value.group(2) else "value"
    return found


CHOICES = {
    "method": ("--method",),
    "policy": ("--policy",),
    "rule": ("--rule",),
    "dtype": ("--dtype",),
    "quantization": ("--quantization",),
    "drafter quantization": ("--drafter-quantization",),
    "pair": ("--pair",),
    "ngram levels": ("--ngram-levels",),
    "mode": ("--remote", "http://localhost", "--mode"),
    "encoding": ("--remote", "http://localhost", "--encoding"),
    "q rows": ("--remote", "http://localhost", "--q-rows"),
    "on loss": ("--remote", "http://localhost", "--on-loss"),
    "gate": ("--remote", "http://localhost", "--gate"),
    "device": ("--device",),
}


def choices(*_: Any) -> dict[str, list[str]]:
    """Valid values of options, as the error for an invalid value lists them."""
    found = {name: _listed("run", "x", *flags, "invalid") for name, flags in CHOICES.items()}
    return {**found, "prompt class": _listed("bench", "--kind", "invalid")}


def _listed(*arguments: str) -> list[str]:
    code, out, err = terminal(*arguments)
    assert code == 2 and not out, (arguments, code, out, err)
    return listed(err.splitlines()[-1])


def constants(*_: Any) -> list[str]:
    files = [path for name in SOURCES if (ROOT / name).exists() for path in (ROOT / name, *(ROOT / name).rglob("*.py"))]
    text = "".join(path.read_text("utf-8") for path in files if path.is_file())
    return [name for name in CONSTANTS if f'"{name}"' in text]


# --- traces ----------------------------------------------------------------------------------------------------


def trace(models: tuple[str, str], service: Service, page: Page) -> dict[str, Any]:
    """Keys of the trace; one run per policy and link collects the keys that depend on them."""
    target, drafter = models
    first = ("run", traces.PROMPT, "--json", "--device", "cpu", "--target", target, "--drafter", drafter)
    kept: dict[str, dict[str, None]] = {}

    def keys(section: str, *values: Any) -> None:
        for value in values:
            kept.setdefault(section, {}).update(dict.fromkeys(value or ()))

    def run(*flags: str) -> list[dict[str, Any]]:
        code, out, err = terminal(*first, *flags)
        assert code == 0, (flags, err)
        head, *steps, end = map(json.loads, out.splitlines())
        keys("header", head)
        keys("recipe", head["recipe"])
        keys("recipe.cloud", head["recipe"]["cloud"])
        keys("environment", head["environment"])
        keys("environment.parity", head["environment"].get("parity"))
        keys("end", end)
        keys("end, values", [end["end"]])
        keys("metrics", end["metrics"])
        keys("metrics.remote", end["metrics"].get("remote"))
        for step in steps:
            keys("step", step)
            keys("kind, values", [step["kind"]])
            keys("memory", step["memory"])
            keys("remote", step.get("remote"))
            keys("laws, drafted", *step.get("laws", ()), *step.get("drafted", ()))
        return steps

    for flags in (("--top", "2"), ("--method", "beam"), ("--method", "ar")):
        run("--max-tokens", "8", *flags)
    policies = {}
    for policy in _listed("run", "x", "--policy", "invalid"):
        steps = run("--max-tokens", "8", "--policy", policy)
        policies[policy] = sorted({key for step in steps for key in step["policy"]})
    for flags in REMOTE:
        run("--max-tokens", "6", "--remote", service.url, "--deadline-ms", "5000", *flags)
    return {**{section: sorted(found) for section, found in kept.items()}, "policy": policies}


REMOTE = (
    ("--temperature", "1"),
    ("--encoding", "msgpack", "--temperature", "1", "--q-rows", "scalar"),
    ("--gate", "nll", "entropy", "margin", "numbers", "--gate-ratio", "0.5"),
    ("--gate", "nll", "--gate-nll", "900"),
    ("--gate", "variance", "names", "rare"),
    ("--provisional", "--deadline-ms", "1", "--rtt-ms", "30", "--max-tokens", "8"),
    ("--mode", "cloud_only"),
    ("--mode", "edge_only"),
)


def bench(models: tuple[str, str], *_: Any) -> dict[str, list[str]]:
    """Keys of a row in the JSON line of `bench`."""
    target, drafter = models
    flags = ("--method", "draft", "--gamma", "2", "--kind", "adversarial", "--max-tokens", "2")
    code, out, err = terminal("bench", "--target", target, "--drafter", drafter, "--device", "cpu", *flags)
    assert code == 0, err
    ((name, rows),) = json.loads(out.splitlines()[-1]).items()
    return {name: sorted(rows[0])}


def forecast(models: tuple[str, str], *_: Any) -> dict[str, list[str]]:
    result = preflight(*models)
    return {"result": sorted(result), "estimates": sorted(result["estimates"][0])}


# --- cloud service ---------------------------------------------------------------------------------------------


def network(_: Any, service: Service, __: Any) -> dict[str, Any]:
    """Routes, message fields and error codes of the cloud service."""
    status, text = service.ask("GET", "/openapi.json")
    assert status == 200, text
    schema = json.loads(text)
    routes: dict[str, Any] = {}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            routes[f"{method.upper()} {path}"] = {
                "request": _content(schema, operation.get("requestBody", {})),
                "response": _content(schema, answers["200"]),
                "errors": sorted(set(answers) - {"200"}),
                "error": _content(schema, answers.get("422", {})),
            }
    body = {"tokens": [1, 2, 3], "sampling_cfg": {"temp": 0.0}, "max_tokens": 2}
    status, text = service.ask("POST", "/v1/texts", body)  # before the error codes, which use up the rate limit
    assert status == 200, text
    words = [line for line in text.splitlines() if not line.isdigit()]  # the other lines are token ids
    return {"routes": routes, "codes": _codes(service), "texts": words}


def _content(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    return {kind: _fields(schema, one.get("schema", {})) for kind, one in part.get("content", {}).items()}


def _fields(schema: dict[str, Any], part: dict[str, Any]) -> Any:
    """Field names of a schema, with references resolved: component names are not part of the contract."""
    if "$ref" in part:
        part = schema["components"]["schemas"][part["$ref"].rpartition("/")[2]]
    if "properties" in part:
        return {name: _fields(schema, one) for name, one in part["properties"].items()}
    for one in (*part.get("anyOf", ()), *part.get("allOf", ()), *([part["items"]] if "items" in part else ())):
        if found := _fields(schema, one):
            return found
    return sorted(map(str, part["enum"])) if "enum" in part else {}


def _codes(service: Service) -> dict[str, int]:
    """Error codes with their HTTP status, each provoked by a request that deserves it."""
    text = [1, 2, 3]
    opening = {"ctx_id": "golden", "epoch": 1, "round": 0, "base": 0, "tokens": text, "k": 0}
    sampling = {"temp": 0.0, "seed": 1, "rule": "rejection"}
    status, answer = service.ask("POST", "/v1/rounds", {**opening, "sampling_cfg": sampling})
    assert status == 200, answer
    seen = hashlib.blake2b(struct.pack("<3I", *text), digest_size=8).hexdigest()
    onward = {**opening, "round": 1, "base": 3, "digest": seen, "tokens": [json.loads(answer)["bonus"]]}
    status, answer = service.ask("POST", "/v1/rounds", onward)
    assert status == 200, answer  # a prefix is identified by this digest
    requests = [
        service.request("GET", "/v1/target"),
        service.ask("GET", "/nowhere"),
        service.ask("POST", "/v1/rounds", {**onward, "ctx_id": "unknown"}),
        service.ask("POST", "/v1/rounds", {**onward, "epoch": 0}),
        service.ask("POST", "/v1/rounds", {"nonsense": 1}),
        service.ask("POST", "/v1/rounds", b"{"),
        service.ask("POST", "/v1/rounds", b"x", content_type="text/plain"),
        service.ask("POST", "/v1/rounds", b" " * 200_000),
        service.ask("DELETE", "/v1/contexts/golden"),
    ]
    while requests[-1][0] != 429 and len(requests) < 1000:
        requests.append(service.ask("GET", "/v1/target"))
    problems = [(status, json.loads(body)) for status, body in requests if status != 200]
    return {problem["code"]: status for status, problem in problems if problem["error"]}


def completions(_: Any, service: Service, __: Any) -> dict[str, Any]:
    """Fields of the OpenAI-compatible endpoint, complete and streamed, and of its errors."""
    options = {"model": "default", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    requests = {
        "/v1/completions": {**options, "prompt": "abc abc abc abc", "logprobs": 1},
        "/v1/chat/completions": {**options, "messages": [{"role": "user", "content": "abc abc"}], "logprobs": True},
    }
    found: dict[str, Any] = {"/v1/models": _keys(json.loads(service.ask("GET", "/v1/models")[1]))}
    for path, body in requests.items():
        status, text = service.ask("POST", path, body)
        assert status == 200, text
        asked = {"include_usage": True, "speculation": True}
        _, stream = service.ask("POST", path, {**body, "stream": True, "stream_options": asked})
        events = [line.removeprefix("data: ") for line in stream.splitlines() if line and line != "data: [DONE]"]
        found[path] = {"response": _keys(json.loads(text)), "stream": _union(map(_keys, map(json.loads, events)))}
    status, text = service.ask("POST", "/v1/completions", {**options, "prompt": "a", "n": 2})
    return {**found, "error": {"status": status, **_keys(json.loads(text))}}


def _keys(value: Any) -> Any:
    """Return nested keys; entries of a list have the same keys, and those of `top_logprobs` may be texts of tokens."""
    if isinstance(value, list):
        return _union(map(_keys, value))
    if not isinstance(value, dict):
        return {}
    return {name: {} if name == "top_logprobs" else _keys(part) for name, part in value.items()}


def _union(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    union: dict[str, Any] = {}
    for part in parts:
        for name, keys in part.items():
            union[name] = _union([union.get(name, {}), keys])
    return union


# --- page ------------------------------------------------------------------------------------------------------


def page_names(_: Any, __: Any, page: Page) -> dict[str, Any]:
    """API endpoints, settings, storage keys, routes and elements, from the page's description."""
    config = page.json("/config")
    parts = [one["props"] for one in config["components"]]
    endpoints = page.json(f"{config['api_prefix']}/info")["named_endpoints"]
    scripts = [js for one in config["dependencies"] if isinstance(js := one.get("js"), str)]
    scripts += [text for one in parts if one.get("js_on_load") for text in page.scripts(one["js_on_load"])]
    values = "".join(str(one.get("value")) for one in parts)
    settings = re.findall(r'data-setting="(\w+)"', values)
    return {
        "api": {
            name: {one["parameter_name"]: one["parameter_has_default"] for one in endpoint["parameters"]}
            for name, endpoint in endpoints.items()
        },
        "api prefix": config["api_prefix"],
        "links and stored settings": [*settings, "prompt", "compare"],
        "browser state": {one["storage_key"]: one["secret"] for one in parts if "storage_key" in one},
        "storage keys and events": sorted(set(re.findall(r"\"(specdemo[-:][\w-]+)\"", "".join(scripts)))),
        "elements": sorted(
            {*re.findall(r'\bid="([\w-]+)"', values), *(one["elem_id"] for one in parts if one.get("elem_id"))}
        ),
        "classes": sorted({name for one in parts for name in one.get("elem_classes") or ()}),
        "routes": [path for path in ("/health",) if page.request("GET", path)[0] in (200, 503)],
    }


# Attributes with few values
FIXED = ("by", "exact", "fate", "kind", "kpi", "lane", "legend", "newline", "state", "tone")
# Notes of steps over a link: sent before the answer, answered late, skipped by a gate, continued without the cloud.
NOTES = ({}, {"provisional": 1.0}, {"confirmed": 1.0, "overruled": 0.0}, {"escalated": 0.0}, {"lost": 1.0, "edge": 1.0})
SHOWN = """() => {
  const inside = [...document.querySelectorAll(".cockpit, .cockpit *")];
  const data = {};
  for (const node of [...inside, ...document.querySelectorAll("[data-run]")])
    for (const [name, value] of Object.entries(node.dataset)) (data[name] ??= []).push(value);
  return { ids: inside.map((node) => node.id), classes: inside.flatMap((node) => [...node.classList]), data };
}"""


def lanes() -> str:
    """Traces that fill every lane: with recorded distributions, AR decoding, beam search, and a tree over a link."""
    golden = traces.golden_traces()
    tree = list(map(json.loads, golden["tree"].splitlines()))
    for line, notes in zip((line for line in tree if "i" in line), NOTES, strict=False):
        if notes:
            line["remote"] = notes
    return "".join((golden["draft-top"], golden["ar"], golden["beam"], *(json.dumps(line) + "\n" for line in tree)))


def frames(_: Any, __: Any, page: Page) -> dict[str, Any]:
    """Keys of the frames that the page sends to the browser, and the traces that it offers."""
    text = lanes()
    frame = page.open_trace(text)
    run, records = frame["run"], frame["r"]
    first = {lane: next(one["head"] for one in records if one["l"] == lane and "head" in one) for lane in frame["plan"]}
    steps = [record for record in records if "step" in record]
    nodes = [node for record in steps for node in record["nodes"]]
    figures = frame["figures"]["spec"]
    with connect(f"{page.url}/frames/{run}".replace("http", "ws", 1)) as socket:
        last_frame = json.loads(socket.recv(timeout=60))
    return {
        "frame": sorted(frame),
        "lanes": frame["plan"],
        "phase": frame["phase"][:1],
        "tiles": sorted(frame["tiles"]),
        "record": sorted({key for one in records for key in one}),
        "head": sorted(first["spec"]),
        "by": sorted({record["by"] for record in steps if "by" in record}),
        "node": sorted({key for node in nodes for key in node}),
        "node, states": sorted({node["state"] for node in nodes}),
        "refused": sorted(page.open_trace("nonsense")),
        "missed": sorted(page.json(f"/frames/{run}?from=1")),
        "figures": sorted(figures),
        "figures, what_if": sorted(figures["what_if"]),
        "all lanes exported": len(page.request("GET", f"/traces/{run}/all")[1].splitlines()) == len(text.splitlines()),
        "recorded": page.recordings(),
        "socket": sorted(last_frame),
    }


def document(_: Any, __: Any, page: Page) -> dict[str, Any]:
    """Ids, classes and data attributes in a browser after traces were shown and a step was opened."""
    from e2e import browser
    from e2e.page_fixtures import PATIENCE, RETURNING
    from playwright.sync_api import sync_playwright

    path = browser.executable()
    assert path, browser.MISSING
    golden = traces.golden_traces()
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        tab = opened.new_page()
        tab.set_default_timeout(PATIENCE * 1000)
        tab.add_init_script(RETURNING)
        tab.goto(page.url)
        tab.locator("body[data-shown=yes]").wait_for()  # the modules are mounted

        def show(text: str, lane: str) -> None:
            file = {"name": "trace.jsonl", "mimeType": "text/plain", "buffer": text.encode()}
            tab.locator("#trace-file").set_input_files(file)
            tab.locator(f"#lane-{lane} .tok").first.wait_for()

        show(golden["nasd"] + golden["ar"], "ar")  # equal texts
        tab.locator("#details summary").click()
        tab.locator("#sameness").wait_for()
        states = [tab.evaluate(SHOWN)]
        show(lanes(), "fourth")
        tab.locator("#figures summary").click()
        tab.locator("#rounds td").first.wait_for()
        token = tab.locator("#lane-spec .tok[data-kind=accepted]").first
        token.hover()
        tab.locator("#tip").wait_for()
        states.append(tab.evaluate(SHOWN))
        token.click()
        tab.locator("#round-nodes .node").first.wait_for()
        states.append(tab.evaluate(SHOWN))
        tab.locator("#round-close").click()  # the details of the step cover other lanes
        tab.locator("#lane-fourth .tok").first.click()
        tab.locator("#round-at").fill("2")
        tab.locator("#round-tree svg").wait_for()
        states.append(tab.evaluate(SHOWN))
        opened.close()
    names = sorted({name for state in states for name in state["data"]})
    values = {name: {value for state in states for value in state["data"].get(name, ())} for name in names}
    return {
        "ids": sorted({name for state in states for name in state["ids"] if name}),
        "classes": sorted({name for state in states for name in state["classes"]}),
        "data": {name: sorted(values[name]) if name in FIXED else [] for name in names},
    }


SECTIONS = {
    "commands": commands,
    "app.py": lambda *_: _arguments(script(sys.executable, "app.py", "--help")),
    "make": lambda *_: re.findall(r"^\s+make (\w+)", script("make", "help"), re.MULTILINE),
    "choices": choices,
    "environment variables": lambda *_: limit_variables(),
    "constants": constants,
    "bench": bench,
    "preflight": forecast,
    "trace": trace,
    "completions": completions,  # before the section that uses up the rate limit
    "service": network,
    "page": page_names,
    "frames": frames,
    "document": document,
}
