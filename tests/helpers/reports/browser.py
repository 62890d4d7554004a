"""A headless Chromium that reads pages from disk, and hears of everything a page complains of or
asks for."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REMEDY = (
    f"no Chromium ({', '.join(NAMES)}) on this machine, so no page was opened. Install one: make"
    " browser"
)


def executable() -> str | None:
    """Of the system: Playwright's own need not be there."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launched() -> Iterator[Browser]:
    """Without the sandbox, which does not work for root."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, path: Path, **options: Any) -> Iterator[Page]:
    """Fails on any message in the console, any error, any request but for files and data. options:
    of the page, e.g. color_scheme."""
    page = browser.new_page(**options)
    heard = list[str]()
    page.on("console", lambda message: heard.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.append(f"error: {error}"))
    inside = ("file:", "data:")
    page.on("request", lambda one: None if one.url.startswith(inside) else heard.append(one.url))
    page.goto(path.resolve().as_uri())
    yield page
    page.close()
    assert heard == []
