"""Table of drafters for the target of the settings."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from e2e.page_fixtures import grave, open_group
from specdemo import fit

pytestmark = [pytest.mark.slow, pytest.mark.browser]


def test_the_table_lists_drafters_reasons_and_the_advice(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(fit, "model_directories", lambda: [("LM Studio", tmp_path)])
    table = page.locator("#fit-table")
    expect(page.locator("#fit")).to_be_hidden()
    open_group(page, "Advanced settings", "Models and devices")
    page.locator("#find-drafter").click()
    expect(page.locator("#fit-stop")).to_be_visible()
    expect(table.locator("tbody tr")).to_have_count(5)
    expect(page.locator("#fit-stop")).to_be_hidden()
    expect(page.locator("#fit-status")).to_contain_text("done: 4 of 4 candidates are measured")
    expect(table.locator("p").first).to_contain_text(re.compile("fits best; .*speed of AR decoding|Do not speculate"))
    measured = table.locator("tbody tr", has_text="pair/drafter")
    expect(measured).to_contain_text(re.compile(r"yes.*MB.*%.*v\(\d\) \d.*\d\.\d+ \[\d\.\d+, \d\.\d+\]", re.S))
    expect(table.locator("tbody tr").last).to_contain_text(re.compile(r"broken\.gguf\s*no\s*–"))
    expect(table.locator("li", has_text="broken.gguf")).to_contain_text("not a usable GGUF file")
    expect(table.locator("li", has_text="pair/drafter")).to_contain_text("specdemo run PROMPT --target")
    assert not grave(page, "#fit", "#settings")
