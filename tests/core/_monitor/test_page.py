"""The report in a browser: its numbers, narrow and wide, and how large it is for long jobs."""

import re
import shlex
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.core._monitor.epochs import make_epochs
from tests.support.browser import barriers, browser, complaints, open_file, overflow
from tests.support.report import numbers_of
from torch_join import JoinMonitor
from torch_join.integration import EpochRecord


def write(folder: Path, ranks: int, epochs: int, donates: bool = False) -> Path:
    monitor = JoinMonitor(folder / "report.html")
    monitor.epochs += make_epochs(ranks, epochs, donates)
    monitor.write()
    return folder / "report.html"


@pytest.mark.parametrize("width", [400, 1400])
def test_the_report(tmp_path: Path, width: int) -> None:
    path = write(tmp_path, 3, 2, donates=True)
    with browser(width) as page:
        open_file(page, path)
        assert complaints(page) == []
        assert overflow(page) <= 0
        assert barriers(page) == []
        assert page.title == page.find_element("tag name", "h1").text == "What uneven inputs cost"
        text = page.find_element("tag name", "body").text
        # Epochs of 0, 10, 20 batches and of 0, 11, 21: of which 30 and 31 tenths of rank-seconds are idle.
        for part in (
            "3 ranks, 2 epochs, 62 batches, 4.1 s in training loops",
            "50%\n6.1 s of 12.3 s, added up over ranks",
            "20 steps\nof 41, or about 2 s of 4.1 s",
            "20%\n1.2 s of 6.2 s with batches",
            "6 donated batches, 6.0 MB",
            "rank 0",
            "rank 1",
            "rank 2",
            f"on {socket.gethostname()}, ",
            "weighting world: ",
            shlex.join(sys.orig_argv),
            "20 steps could be saved: pass rebalance=True, or give the ranks more even shards.",
        ):
            assert part in text
        assert rows(page, "ranks")[2].split()[:2] == ["2", "41"]
        assert page.find_element("id", "rank-head").text.split()[-3:] == ["Counted", "Given", "Received"]
        assert rows(page, "ranks")[2].split()[-3:] == ["164", "0", "6"]
        kept = page.execute_script(
            "const made = []; HTMLAnchorElement.prototype.click = function () { made.push(this.download, this.href) };"
            " document.getElementById('save').click(); return made"
        )
        assert kept[0] == "join-report.json"
        assert kept[1].startswith("blob:")
        assert [row.split()[:4] for row in rows(page, "epochs")] == [["0", "2", "s", "20"], ["1", "2.1", "s", "21"]]

        page.execute_script(
            "const choice = document.querySelector('select'); choice.value = '1';"
            " choice.dispatchEvent(new Event('change'))"
        )
        assert "10 steps\nof 21, or about 1 s of 2.1 s" in page.find_element("id", "numbers").text
        assert rows(page, "ranks")[2].split()[:2] == ["2", "21"]
        assert rows(page, "ranks")[0].split()[:2] == ["0", "0"]
        page.execute_script(
            "const box = drawing.getBoundingClientRect(); drawing.dispatchEvent(new PointerEvent('pointermove',"
            " {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2}))"
        )
        tip = page.find_element("id", "tip")
        assert tip.text == "rank 1, epoch 1: 11 batches, 1.1 s with batches, 1 s idle"
        assert overflow(page) <= 0
        assert complaints(page) == []
        for style in ("dark", "light"):
            media = {"features": [{"name": "prefers-color-scheme", "value": style}]}
            page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            color = page.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert (max(map(int, re.findall(r"\d+", color))) < 100) == (style == "dark")


def rows(page: object, table: str) -> list[str]:
    found: list[str] = page.execute_script(  # type: ignore[attr-defined]
        f"return [...document.getElementById('{table}').rows]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText).join(' '))"
    )
    return found


@pytest.mark.parametrize(("ranks", "epochs", "rows_of_ranks"), [(64, 200, 64), (300, 40, 100), (1, 700, 1)])
def test_long_jobs(tmp_path: Path, ranks: int, epochs: int, rows_of_ranks: int) -> None:
    path = write(tmp_path, ranks, epochs)
    assert path.stat().st_size < 1_000_000
    with browser(400) as page:
        open_file(page, path)
        assert complaints(page) == []
        assert overflow(page) <= 0
        assert len(rows(page, "ranks")) == rows_of_ranks
        assert len(rows(page, "epochs")) == min(epochs, 500)
        assert f"{ranks} rank{'s'[: ranks - 1]}, {epochs} epochs" in page.find_element("tag name", "header").text


def test_it_loads_nothing(tmp_path: Path) -> None:
    text = write(tmp_path, 3, 2).read_text()
    assert not re.findall(r"""(?:src|href)=|url\(|@import|https?:|fetch\(|\$\{[a-z_]+\}""", text.split("<script>")[0])
    assert "fetch(" not in text
    assert text.count("://") == text.count('<a href="https://') == 1  # a link, which is followed by a click alone


def test_a_page_of_a_long_job(tmp_path: Path) -> None:
    """With numbers of six digits; without a browser."""
    monitor = JoinMonitor(tmp_path / "report.html")
    for epoch in make_epochs(40, 200, donates=True):
        ranks = [
            replace(
                rank,
                batches=100_003 + rank.batches,
                active_seconds=33_712.34 + rank.batches / 7,
                reading_seconds=3_371.23,
            )
            for rank in epoch.ranks
        ]
        monitor.epochs.append(EpochRecord.of(epoch.epoch, ranks))
    monitor.write()
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_short_times_keep_their_digits(tmp_path: Path) -> None:
    monitor = JoinMonitor(tmp_path / "report.html")
    monitor.epochs += make_epochs(3, 1, step=0.000_2)
    monitor.write()
    whole = numbers_of(tmp_path / "report.html")["whole"]
    assert [cells[1:3] for cells in whole] == [[0, 0.004], [0.002, 0.002], [0.004, 0]]
