"""Drive the playground in a browser, for tests and screenshots."""

from __future__ import annotations

from typing import Any

TIMEOUT_MS = 60_000  # needed only on a busy machine


class Playground:
    """A page of the playground. It waits for conditions of the page, never for fixed times."""

    def __init__(self, page: Any) -> None:
        self.page = page
        page.set_default_timeout(TIMEOUT_MS)

    def open(self, url: str, *, model: str | None = None, tab: str | None = None) -> Playground:
        self.page.goto(f"{url}/")
        self.page.locator("[role=tab]").first.wait_for()
        if model is not None:
            self.page.select_option("#model", model)
        return self if tab is None else self.choose(tab)

    def open_without_tabs(self, url: str) -> Playground:
        """Open the page of a server that lists its models only with a key."""
        self.page.goto(f"{url}/")
        self.page.locator("#key-form").wait_for()
        return self

    @property
    def tabs(self) -> list[str]:
        found: list[str] = self.page.locator("[role=tab]").all_inner_texts()
        return found

    def choose(self, tab: str) -> Playground:
        self.page.get_by_role("tab", name=tab, exact=True).click()
        return self

    @property
    def panel(self) -> Any:
        return self.page.locator("[role=tabpanel]:visible")

    def field(self, name: str) -> Any:
        """A field of the open tab, by the last part of its id."""
        return self.panel.locator(f"[id$='-{name}']").first

    def fill(self, **values: str) -> Playground:
        for name, value in values.items():
            self.field(name).fill(value)
        return self

    def open_options(self) -> Playground:
        if not self.panel.locator("details[open]").count():
            self.panel.locator("summary").click()
        return self

    def run(self) -> Playground:
        """Press the tab's button and wait until the answer or an error is shown."""
        self.panel.locator("button.main").click()
        return self.wait()

    def wait(self) -> Playground:
        self.page.locator("[role=tabpanel]:visible form:not([aria-busy])").wait_for()
        return self

    @property
    def results(self) -> Any:
        return self.panel.locator(".results")

    @property
    def errors(self) -> list[str]:
        found: list[str] = self.page.locator(".error:visible").all_inner_texts()
        return found

    @property
    def said(self) -> str:
        text: str = self.panel.locator(".said").inner_text()
        return text

    def code(self, language: str) -> str:
        self.panel.locator(f"[data-language={language}]").click()
        text: str = self.panel.locator("pre").inner_text()
        return text

    @property
    def scrolls_sideways(self) -> bool:
        root = "document.documentElement"
        wider: bool = self.page.evaluate(f"{root}.scrollWidth > {root}.clientWidth")
        return wider
