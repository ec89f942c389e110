"""A headless Chromium, for pages that people look at."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def browser(width: int = 1200, height: int = 900) -> Iterator[Any]:
    """Yield a driver of Debian's Chromium, with a window of this size in CSS pixels; skip the test where there is none.

    Raises:
        AssertionError: There is none, and this is CI, which installs one.
    """
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        assert not os.environ.get("CI"), "no Chromium, or no chromedriver, in CI"
        pytest.skip("no Chromium and chromedriver here")
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium here")

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "hide-scrollbars",
        "force-device-scale-factor=1",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        # Not by the window, of which Chromium takes no narrower one than 500.
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        page.set_page_load_timeout(30)
        yield page
    finally:
        page.quit()


def complaints(page: Any) -> list[str]:
    """Return what the page that is open has written to the console since it was last asked, as errors and warnings."""
    return [entry["message"] for entry in page.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def barriers(page: Any) -> list[str]:
    """Return what axe finds on the page that is open, light and dark: contrast, labels, headings, keyboard access."""
    selenium = pytest.importorskip("axe_core_python.selenium", reason="no axe here")
    found = []
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        page.execute_script("document.getAnimations().forEach(each => each.finish())")  # colours that change slowly
        for each in selenium.Axe().run(page)["violations"]:
            found += [f"{scheme}: {each['help']}: {node['html']}" for node in each["nodes"]]
    return found


def overflow(page: Any) -> int:
    """Return by how many pixels the page that is open is wider than its window."""
    return int(page.execute_script("return document.documentElement.scrollWidth - window.innerWidth"))


def open_file(page: Any, path: Path, anchor: str = "") -> None:
    """Open a page of this machine's."""
    page.get(path.resolve().as_uri() + anchor)
