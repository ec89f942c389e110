"""The documentation is built without a warning, and its pages are whole: in a browser, narrow and wide."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

from tests.docs.snippets import DOCS, pages
from tests.support.browser import barriers, browser, complaints, open_file, overflow
from tests.support.commands import once

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="no Sphinx here")
WIDTHS = (400, 1400)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "site", build)


def build(folder: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", str(DOCS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


class Page(HTMLParser):
    """What a page links to, shows, and can be linked at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.anchors |= {found[name] or "" for name in ("id", "name") if name in found}
        name = {"a": "href", "img": "src", "link": "href", "script": "src"}.get(tag, "")
        if target := found.get(name):
            self.targets.append(target)

    def inner(self) -> Iterator[tuple[str, Path, str]]:
        """Yield what is linked to within the site: the link, its file, and the anchor there."""
        for target in self.targets:
            if target.startswith(("http:", "https:", "mailto:", "data:")):
                continue
            path, anchor = urldefrag(target)
            path = unquote(path.split("?")[0])
            yield target, (self.path.parent / path).resolve() if path else self.path.resolve(), unquote(anchor)


def written(site: Path) -> list[Path]:
    """Return the pages that somebody has written, or that are made of docstrings."""
    return sorted(path for path in site.rglob("*.html") if "_modules" not in path.parts and "_static" not in path.parts)


def test_each_page_is_built(site: Path) -> None:
    expected = {path.relative_to(DOCS).with_suffix(".html") for path in pages() if DOCS in path.parents}
    assert expected <= {path.relative_to(site) for path in written(site)}


def test_no_link_is_broken(site: Path) -> None:
    known = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    broken = [
        f"{path.relative_to(site)}: {link}"
        for path in written(site)
        for link, file, anchor in known[path.resolve()].inner()
        if not file.exists() or (anchor and file in known and anchor not in known[file].anchors)
    ]
    assert broken == []


def test_pages_of_others_are_linked_by_a_secure_address(site: Path) -> None:
    links = {link for path in written(site) for link in Page(path).targets if link.startswith("http:")}
    assert links == set()


@pytest.mark.parametrize("width", WIDTHS)
def test_each_page_opens(site: Path, width: int) -> None:
    with browser(width) as page:
        for path in written(site):
            open_file(page, path)
            name = path.relative_to(site)
            assert complaints(page) == [], name
            assert overflow(page) <= 0, f"{name} is {overflow(page)} pixels too wide"
            images: list[Any] = page.execute_script(
                "return [...document.images].filter(each => each.complete && !each.naturalWidth).map(each => each.src)"
            )
            assert images == [], name


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_are_accessible(site: Path, width: int) -> None:
    with browser(width) as page:
        for name in ("index.html", "how-do-i/torch.html"):
            open_file(page, site / name)
            assert barriers(page) == [], name


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text('<a href="other.html">a</a> <img src="image.svg"> <a href="#nowhere">b</a> <h1 id="here">c</h1>')
    page = Page(path)
    assert [link for link, file, _ in page.inner() if not file.exists()] == ["other.html", "image.svg"]
    assert page.anchors == {"here"}
