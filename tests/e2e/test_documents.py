"""Documents of the program, opened from the page."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from e2e.page_fixtures import RULES, grave

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.mark.exhaustive
def test_documents_are_opened_from_the_page_and_accessible(page: Page, served: Any) -> None:
    with page.expect_popup() as opened:  # the page keeps its run
        page.locator("#page-links a", has_text="Documentation").click()
    page = opened.value
    expect(page.locator("h1")).to_have_text("specdemo")
    for scheme, rules in RULES.items():
        page.emulate_media(color_scheme=scheme)
        assert not grave(page, schemes=["light"], rules=rules), scheme
    page.locator("nav a[href='edge-cloud']").click()
    page.wait_for_url(f"{served.url}documentation/edge-cloud")  # loaded
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.emulate_media(color_scheme="light")
    page.locator("nav a", has_text="← specdemo").click()
    expect(page.locator("body")).to_have_attribute("data-shown", "yes")
    expect(page.locator("#run")).to_be_visible()
    page.close()
