"""A headless Chromium that reads pages from disk, and hears of everything a page complains of or
asks for.

python -m tests.helpers.reports.browser <page.html> <picture.png> [light|dark] [width] [selector]
# a screenshot of the part that the CSS selector names"""

import shutil
import sys
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
    page.on("request", lambda request: heard.append(request.url) if _outside(request.url) else None)
    page.goto(path.resolve().as_uri())
    yield page
    page.close()
    assert heard == []


def _outside(url: str) -> bool:
    return not url.startswith(("file:", "data:"))


def main(
    page: str, picture: str, scheme: Any = "light", width: str = "1000", part: str = "body"
) -> None:
    size = {"width": int(width), "height": 800}
    with (
        launched() as browser,
        opened(browser, Path(page), color_scheme=scheme, viewport=size) as view,
    ):
        view.locator(part).screenshot(path=picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
