"""The wheel and the source archive: what is in them, and that they work where nothing of this repository is."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from torch_join import __version__

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = ["lightning", "pytorch_lightning", "accelerate", "transformers", "torchmetrics"]
PACKAGES = ["accelerate_join", "lightning_join", "pytorch_lightning_join", "torch_join"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive, and the wheel out of it; return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(built / f"torch_join-{__version__}-py3-none-any.whl")


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    return message_from_string(wheel.read(f"torch_join-{__version__}.dist-info/METADATA").decode())


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if not name.startswith(f"torch_join-{__version__}.dist-info/")}
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == sources
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert f"torch_join-{__version__}.dist-info/licenses/LICENSE" in wheel.namelist()


def test_the_source_archive_holds_what_the_tests_need(built: Path) -> None:
    with tarfile.open(built / f"torch_join-{__version__}.tar.gz") as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    expected = {"tests", "docs", "examples", "benchmarks", "scripts", "pyproject.toml", "constraints.txt", *PACKAGES}
    assert expected <= tops
    assert {top for top in tops if top.startswith(".") or top in ("dist", "lightning_logs")} <= {".gitignore"}


def test_the_description_is_the_readme_with_links_to_the_repository(wheel: zipfile.ZipFile) -> None:
    metadata, readme = metadata_of(wheel), (ROOT / "README.md").read_text()
    description = str(metadata.get_payload())
    base = "https://github.com/torch-join/torch-join"
    ours, theirs = (re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", text) for text in (readme, description))
    assert len(ours) == len(theirs) > 10
    for (is_image, link), (_, absolute) in zip(ours, theirs, strict=True):
        is_relative = not link.startswith(("https://", "#"))
        assert absolute == (f"{base}/{'raw' if is_image else 'blob'}/main/{link}" if is_relative else link)
        assert not is_relative or (ROOT / link.partition("#")[0]).exists(), link
    assert re.sub(rf"\({base}/(?:raw|blob)/main/", "(", description) == readme


def test_python_versions_are_those_that_are_tested(wheel: zipfile.ZipFile) -> None:
    metadata = metadata_of(wheel)
    names = [name.rpartition(" ")[2] for name in metadata.get_all("Classifier", []) if "Python :: 3." in name]
    table = (ROOT / "docs" / "versions.md").read_text()
    lowest, highest = re.search(r"^\| Python \| 3\.(\d+) \| 3\.(\d+) \|", table, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert names == [f"3.{minor}" for minor in range(int(lowest), int(highest) + 1)]
    assert metadata["Requires-Python"] == f">=3.{lowest}"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {url.split(", ")[0] for url in metadata.get_all("Project-URL", [])} == {
        *("Homepage", "Documentation", "Source", "Issues", "Changelog", "Security"),
    }


def test_twine_finds_nothing_wrong(built: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_works_elsewhere_without_any_framework(built: Path, tmp_path: Path) -> None:
    target, wheel = tmp_path / "target", next(built.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    script = f"""
import sys
sys.modules.update(dict.fromkeys({FRAMEWORKS}))
import torch, torch_join, torch_join.integration
with torch_join.Join([torch.optim.SGD([torch.zeros(1)])]) as join:
    print(torch_join.__file__, torch_join.__version__, sum(join.batches([1, 2])))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(target / "torch_join" / "__init__.py"), __version__, "3"], done.stderr
