"""Fixtures and helpers for browser tests of the page.

A prompt equal to the name of a script below is decoded by that script, other prompts by the real engine. Tests wait for
conditions, at most `PATIENCE` seconds.
"""

import gc
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from fakes.http_server import free_port
from fakes.shown_claims import READ, without_names
from fakes.shown_figures import Claim, RunFigures, unexplained
from fakes.traces import end, events_of, header, jsonl, step
from playwright.sync_api import BrowserContext, Locator, Page, expect, sync_playwright

from e2e import browser
from specdemo.core.errors import UserError
from specdemo.core.events import Event, StepEvent
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.ui.limits import HostLimits
from specdemo.ui.page import build

PATIENCE = 150.0
WINDOW = {"width": 1280, "height": 900}
IMMEDIATE = 600  # tokens of the script
MOST_CHARACTERS = 10_000  # of a prompt: a browser takes seconds to lay out 100,000
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--renderer-process-limit=1",  # tabs share compiled scripts: a page starts a quarter faster
]
CODE = 'def fibonacci(n):\n    """'
RETURNING = """try {
    for (const [name, value] of [["specdemo-pace", "instant"], ["specdemo-opened", "yes"]])
        localStorage.getItem(name) ?? localStorage.setItem(name, value);
} catch {}"""  # a visitor who chose the pace; pages without an origin have no storage


def quick(factor: int) -> str:
    """Script that makes time faster. The clock of Playwright would stay in later tabs, and can reverse timers."""
    return f"""{{
        const now = performance.now.bind(performance), schedule = window.setTimeout;
        performance.now = () => {factor} * now();
        window.setTimeout = (call, delay, ...values) => schedule(call, (delay || 0) / {factor}, ...values);
    }}"""


QUICK = quick(20)
MORE = "More settings"
SHOWN_RUN = "(document.querySelector('[data-run]')?.dataset.run ?? '')"
STARTED = f"{SHOWN_RUN} === window.specdemoRun"  # the page shows the run that Run began last
MARKUP = "<img src=x onerror='window.harmed = true'>"

expect.set_options(timeout=PATIENCE * 1000)


class Scripts:
    """Engine with scripted runs, and events that synchronize tests with the worker thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.inside, self.gate, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.steps = 0
        self.step_s = 0.01  # time between the steps of `endless`
        self.engine = generate  # of other prompts
        self.held_after: int | None = None  # steps after which the engine waits for `gate`
        self.closed_in = ""

    def __call__(self, recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[Event]:
        try:
            script = getattr(self, prompt, None) if isinstance(prompt, str) else None  # a list is a conversation
            yield from events_of(script(recipe)) if script else self.held(self.engine(recipe, prompt, pool, stores))
        finally:
            self.closed_in = threading.current_thread().name
            self.closed.set()

    def held(self, events: Iterator[Event]) -> Iterator[Event]:
        steps = 0
        for event in events:
            if isinstance(event, StepEvent):
                assert steps != self.held_after or self.gate.wait(PATIENCE)
                steps += 1
            yield event

    def endless(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        """Yield steps without end."""
        yield header(prompt="endless")
        self.inside.set()
        while True:
            time.sleep(self.step_s)
            yield step(self.steps, pieces=["b", "X"], draft=("b", "c", "d"), accepted=(0,), tested=2)
            self.steps += 1

    def loading(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        """Occupy the device by loading until `gate` is set."""
        yield {"phase": "loading", "text": "loading the target"}
        self.inside.set()
        assert self.gate.wait(PATIENCE)
        yield from (header(prompt="loading"), step(0, pieces=["a"]), end())

    def gainless(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        """Give two tokens per step, which takes as long as two steps of the baseline."""
        recipe_line = {"method": recipe.method, "pair": "bundled", "gamma": 2, "temperature": 0.0}
        yield header(recipe.method, prompt="gainless", recipe=recipe_line)
        yield step(0, pieces=["a"])
        drafted = {"pieces": ["x", "y"], "draft": ("x", "z"), "accepted": (0,), "tested": 2, "draft_s": 0.0}
        plain = {"pieces": ["x"], "draft_s": 0.0, "verify_s": 0.01}
        for i in range(1, 9 if recipe.method != "ar" else 17):
            yield step(i, **(plain if recipe.method == "ar" else drafted))
        yield end()

    def immediate(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        """Yield tokens at once: at the readable pace their display takes 40 s, longer than the tests look at it."""
        yield header(prompt="immediate")
        for i in range(IMMEDIATE):
            yield step(i, pieces=["b"])
        yield end()

    def full(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        yield from (header(prompt="full"), step(0, pieces=["a"]), end() | {"context_full": True})

    def hostile(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        """Yield text that contains HTML markup."""
        yield header(prompt=MARKUP + "\n    ")
        yield step(0, pieces=["</span><script>window.harmed = true</script>"])
        yield step(1, pieces=[MARKUP, "\n\n\t"], draft=(MARKUP, "\n", "&lt;"), accepted=(0,), tested=2)
        yield end()

    def refused(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        raise UserError(f"unknown method {MARKUP}")
        yield

    def broken(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        yield header(prompt="broken")
        yield step(0, pieces=["a"])
        raise RuntimeError("the device ran out of memory")


@contextmanager
def launched(pair: str | None = "bundled", **options: Any) -> Iterator[Any]:
    """Serve a page on a free port with `options` of `build`."""
    demo = build(pair=pair, **options)
    demo.launch(server_name="127.0.0.1", server_port=free_port())
    gc.freeze()  # as in app.py
    try:
        yield demo
    finally:
        demo.worker.close()
        demo.clouds.close()
        demo.blocks.close(verbose=False)


@pytest.fixture(scope="package")
def scripts() -> Scripts:
    return Scripts()


@pytest.fixture(scope="package")
def served(scripts: Scripts) -> Iterator[Any]:
    with launched(engine=scripts, limits=HostLimits(max_prompt=MOST_CHARACTERS), compare=False) as page:
        yield page


@pytest.fixture(scope="package")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    """Browser, closed before other packages: playwright's event loop would prevent `asyncio.run` in their tests.

    Its profile caches compiled scripts.
    """
    path, profile = browser.executable(), tmp_path_factory.mktemp("profile")
    assert path, browser.MISSING
    permissions = ["clipboard-read", "clipboard-write"]
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch_persistent_context(
            profile, executable_path=path, args=ARGS, permissions=permissions
        ) as opened,
    ):
        yield opened


def clear_storage(chromium: BrowserContext, served: Any) -> None:
    """Clear local storage only: without its cookie, an open tab would lose its session."""
    blank = chromium.new_cdp_session(chromium.pages[0])
    blank.send("Storage.clearDataForOrigin", {"origin": served.url.rstrip("/"), "storageTypes": "local_storage"})
    blank.detach()


@pytest.fixture(scope="package")
def errors() -> list[str]:
    """Errors and dialogs of scripts that no test has reported yet."""
    return []


def report(errors: list[str]) -> None:
    found = errors.copy()
    errors.clear()
    assert not found, found


@pytest.fixture(autouse=True)
def no_errors(errors: list[str]) -> Iterator[None]:
    """Fail with the errors of scripts during a test."""
    yield
    report(errors)


@contextmanager
def tabs(served: Any, chromium: BrowserContext, errors: list[str]) -> Iterator[Callable[..., Page]]:
    """Open tabs without stored data that report `errors`; at the end, check that they contacted no other host."""
    requested, pages = [], []
    clear_storage(chromium, served)

    def open_tab(
        script: str = "",
        width: int = 1280,
        scheme: str = "light",
        query: str = "",
        height: int = 900,
    ) -> Page:
        page = chromium.new_page()
        pages.append(page)
        page.set_default_timeout(PATIENCE * 1000)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: errors.append(error.stack or str(error)))
        page.on("console", lambda message: "js_on_load" in message.text and errors.append(message.text))
        page.on("dialog", lambda dialog: errors.append(dialog.message))
        page.on("console", lambda message: message.type == "error" and print(message.text))  # shown if the test fails
        page.on("response", lambda response: response.status >= 400 and print(response.status, response.url))
        for text in filter(None, (script, RETURNING)):
            page.add_init_script(text)
        page.goto(f"{served.url}{query}")
        expect(page.locator("#lane-spec")).to_be_visible()
        expect(page.locator("body")).to_have_attribute("data-settings", "restored")
        expect(page.locator("body")).to_have_attribute("data-shown", "yes")
        return page

    yield open_tab
    for page in pages:
        page.close()
    clear_storage(chromium, served)
    report(errors)
    external = [url for url in requested if not url.startswith((served.url, "data:", "blob:"))]
    assert bool(requested) == bool(pages) and not external


@pytest.fixture
def tab(served: Any, scripts: Scripts, chromium: BrowserContext, errors: list[str]) -> Iterator[Any]:
    scripts.reset()
    with tabs(served, chromium, errors) as open_tab:
        yield open_tab


@pytest.fixture(scope="package")
def shared(served: Any, chromium: BrowserContext, errors: list[str]) -> Iterator[Page]:
    """Tab shared by the tests of a process."""
    with tabs(served, chromium, errors) as open_tab:
        yield open_tab()


@pytest.fixture(scope="module")
def new_tab(served: Any, chromium: BrowserContext, errors: list[str]) -> Iterator[Page]:
    """Tab of a file, without stored data or a run at first."""
    with tabs(served, chromium, errors) as open_tab:
        yield open_tab()


# In one call, as each call costs some milliseconds.
DEFAULTS = """() => {
    const element = (id) => document.getElementById(id);
    [...document.querySelectorAll("[role=tab]")].find((tab) => tab.textContent.trim() === "Method").click();
    element("pace").value = "instant";
    element("pace").dispatchEvent(new Event("change"));
    element("details").open = element("figures").open = false;
    document.body.classList.remove("dark");
    for (const [id, checked] of [["show-rejected", true], ["safe-colours", false]])
        if (element(id).checked !== checked) element(id).click();
    element("reset").click();
    element("drop-lanes").click();
    document.activeElement.blur();
    return matchMedia("(prefers-reduced-motion: reduce)").matches;
}"""


def with_defaults(page: Page) -> Page:
    page.bring_to_front()  # Chromium draws hidden tabs rarely
    if page.viewport_size != WINDOW:
        resize(page, **WINDOW)
    reduced_motion = page.evaluate(DEFAULTS)
    if reduced_motion:
        page.emulate_media(reduced_motion="no-preference")
    page.mouse.move(0, 0)
    return page


@pytest.fixture
def page(shared: Page, scripts: Scripts) -> Page:
    """The shared tab with default settings."""
    scripts.reset()
    return with_defaults(shared)


@pytest.fixture(scope="module")
def file_tab(shared: Page, scripts: Scripts) -> Page:
    """The shared tab with default settings at first, for a file whose tests keep its state."""
    scripts.reset()
    return with_defaults(shared)


SETTLED = """() => {
    const narrow = matchMedia("(max-width: 768px)").matches;
    return document.querySelector("#settings").classList.contains("open") !== narrow
        && !document.getAnimations().some(one => one instanceof CSSTransition && one.playState === "running");
}"""


def resize(page: Page, width: int, height: int = 900) -> None:
    """Resize the window; wait until the settings have opened or closed."""
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_function(SETTLED)


def run(page: Page, prompt: str, tokens: int | None = None) -> None:
    """Press Run, which replaces the status of an earlier run at once."""
    if tokens:
        set_number(page, "max-tokens", tokens)
    page.locator("#prompt textarea").fill(prompt)
    page.locator("#run").click()


def complete(page: Page, prompt: str, tokens: int | None = None) -> None:
    """Run until the page shows the end, after `tokens` if they are given."""
    run(page, prompt, tokens)
    status(page, f"done: {tokens} tokens" if tokens else "done")


def stop(page: Page) -> None:
    page.locator("#stop").click()
    status(page, "stopped")


def open_group(page: Page, *titles: str) -> None:
    """Open groups of settings, from the outermost inwards, unless they are open."""
    for title in titles:
        group = page.locator("#settings-form summary").get_by_text(title, exact=True)
        if title != MORE and not group.is_visible():
            open_group(page, MORE)
        if not group.evaluate("group => group.parentElement.open"):
            group.click()


def choose_setting(page: Page, name: str, title: str) -> None:
    """Choose the first entry whose text begins with `title`."""
    field = page.locator(f"#{name} select")
    titles = field.locator("option").all_text_contents()
    field.select_option(label=next(entry for entry in titles if entry.startswith(title)))


def configure(page: Page, **settings: Any) -> None:
    """Change settings like a link, without loading the page."""
    page.evaluate("settings => window.specdemo.setSettings(settings)", settings)


def set_number(page: Page, name: str, value: float) -> None:
    if not page.locator(f"#{name}").is_visible():
        open_group(page, MORE)
    page.locator(f"#{name} input[type=number]").fill(f"{value:g}")
    page.locator(f"#{name} input[type=number]").blur()


def status(page: Page, phase: str) -> None:
    expect(page.locator("#status")).to_have_text(re.compile(f"^{phase}"))


def drawn(page: Page, lane: str = "spec") -> Counter:
    return Counter(page.eval_on_selector_all(f"#lane-{lane} .tok", "spans => spans.map(s => s.dataset.kind)"))


def spans(page: Page, least: int) -> None:
    """Wait until the run that began last shows this many tokens; hidden tabs receive no animation frames."""
    page.wait_for_function(f"{STARTED} && document.querySelectorAll('.lane .tok').length >= {least}", polling=100)


def record_phases(page: Page) -> None:
    """Record the phases of the page in `window.phases`: some end before Playwright looks again."""
    page.evaluate("""() => {
        const cockpit = document.querySelector(".cockpit");
        window.phases = [];
        new MutationObserver(() => window.phases.push(cockpit.dataset.phase))
            .observe(cockpit, {attributes: true, attributeFilter: ["data-phase"]});
    }""")


def expect_for_a_moment(page: Page, selector: str, text: str) -> None:
    """Wait for a text that is replaced after a second, looking in each frame."""
    words = "([selector, text]) => document.querySelector(selector).textContent === text"
    page.wait_for_function(words, arg=[selector, text])


def expect_fit(page: Page) -> None:
    """Wait until the page has its width without a horizontal scrollbar."""
    page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")


def lane_action(page: Page, action: str, lane: str = "spec") -> Locator:
    """Return a button of a lane, after its menu was opened."""
    button = page.locator(f"#{action}-{lane}")
    if not button.is_visible():
        page.locator(f"[data-lane={lane}] .menu summary").click()
    return button


def exported(page: Page, button: Locator) -> str:
    with page.expect_download() as download:
        button.click()
    return Path(download.value.path()).read_text("utf-8")


@contextmanager
def saved_page(page: Page, folder: Path) -> Iterator[Page]:
    """Save the displayed run as a web page, and open it; its scripts must not fail."""
    problems: list[str] = []
    path = folder / "saved.html"
    path.write_text(exported(page, page.locator("#save-page")), "utf-8")
    other = page.context.new_page()
    other.on("pageerror", lambda error: problems.append(error.stack or str(error)))
    other.goto(path.as_uri())
    yield other
    other.close()
    page.bring_to_front()
    assert not problems, problems


def withheld(page: Page) -> bool:
    """Return True if other programs disturbed the speed-up of the displayed run."""
    return "not measurable" in page.locator("[data-kpi=speedup]").text_content()


def disturbed(page: Page) -> bool:
    """Return True if other programs disturbed the times of the displayed run, so that they are not explained."""
    return page.locator("#time-rows [data-disturbed]").count() > 0


def saved(page: Page, lane: str = "spec") -> list[dict[str, Any]]:
    return [json.loads(line) for line in exported(page, lane_action(page, "trace", lane)).splitlines()]


def counted(trace: list[dict[str, Any]]) -> Counter:
    """Count tokens by kind from the fields of a trace."""
    kinds: Counter = Counter()
    for line in trace:
        if "i" in line:
            accepted = set(line["accepted"])
            kinds["accepted"] += len(accepted)
            for node in set(range(len(line["draft"]))) - accepted:
                kinds["ignored" if line["beta"][node] is None else "rejected"] += 1
            kinds[line["kind"]] += len(line["tokens"]) - len(accepted)
    return +kinds


def text_of(trace: list[dict[str, Any]]) -> str:
    return trace[0]["prompt"] + "".join(line["text"] for line in trace if "i" in line)


def explained(
    page: Page, selector: str, known: Callable[[str], Iterable[Claim]], run: RunFigures | None = None
) -> set[str]:
    """Fail for a displayed figure that no claim about its part explains; return the parts of the page with figures.

    Names in recipes of the `run` are no figures.
    """
    texts = page.evaluate(READ, [selector])
    for part, text in texts:
        rest = unexplained(without_names(text, run) if run else text, known(part))
        assert not re.search(r"\d", rest), f"unknown figure in {part}: {text!r}, left {rest!r}"
    return {part for part, _ in texts}


AXE = Axe().axe_script
RULES = {
    "light": {},
    "dark": {"runOnly": ["color-contrast", "link-in-text-block"]},
}  # other rules do not depend on colours
VIOLATIONS = """([context, options]) => axe.run(context, options).then(({ violations }) => violations
    .filter(({ impact }) => ["serious", "critical"].includes(impact))
    .map(({ id, nodes }) => [id, nodes.slice(0, 4).map((node) => node.target)]))"""


def grave(page: Page, *parts: str, schemes: Iterable[str] = RULES, rules: dict[str, Any] | None = None) -> list[Any]:
    """Serious and critical axe violations of the page or its `parts`, with four elements, in each colour scheme."""
    violations = []
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
        page.add_style_tag(content="* { transition: none !important }")  # measure final colours
    context = {"include": [[part] for part in parts or ("html",)]}
    for scheme in schemes:
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", scheme == "dark")
        options = {"resultTypes": ["violations"], "preload": False, **(rules or RULES[scheme])}
        violations += [(scheme, *violation) for violation in page.evaluate(VIOLATIONS, [context, options])]
    page.evaluate("document.body.classList.remove('dark')")
    return violations


def cells(rows: Locator) -> list[list[str]]:
    """Return the texts of the cells of table rows."""
    texts: list[list[str]] = rows.evaluate_all(
        "rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent.trim()))"
    )
    return texts


GRID = """([name, rows]) => {
    const drawn = [...document.querySelectorAll(`#${name} [role=row]`)]
        .map((row) => [...row.querySelectorAll("[role=gridcell]")].map((cell) => cell.innerText.trim()))
        .filter((row) => row.length);
    return rows === null ? drawn : JSON.stringify(drawn) === JSON.stringify(rows.slice(0, Math.max(drawn.length, 1)));
}"""


def grid(page: Page, name: str) -> list[list[str]]:
    """Rendered rows; gradio draws only the visible part of a long table."""
    expect(page.locator(f"#{name}").get_by_role("gridcell").first).to_be_visible()
    rows: list[list[str]] = page.evaluate(GRID, [name, None])
    return rows


def expect_grid(page: Page, name: str, rows: Sequence[Sequence[str]]) -> None:
    """Wait until the table shows these rows, or as many of the first as gradio draws."""
    page.wait_for_function(GRID, arg=[name, rows])


def opened(page: Page, text: str | bytes, name: str = "trace.jsonl") -> None:
    content = text if isinstance(text, bytes) else text.encode()
    page.locator("#trace-file").set_input_files([{"name": name, "mimeType": "text/plain", "buffer": content}])


DRAWN = f"before => {SHOWN_RUN} !== before && !document.getElementById('recorded-settings').hidden"


def show(page: Page, *lines: Any) -> None:
    """Open traces and wait until they are shown."""
    with recording_shown(page):
        opened(page, jsonl(*lines))


@contextmanager
def recording_shown(page: Page) -> Iterator[None]:
    """Wait until the recording that the block opens is drawn, and no earlier one."""
    before = page.evaluate(SHOWN_RUN)
    yield
    page.wait_for_function(DRAWN, arg=before)
    status(page, "done: recorded trace")
