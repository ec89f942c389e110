"""Builds the emulator's extension, once for each of its sources and each torch."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

_HERE = Path(__file__).parent
_SOURCES = ("device.cpp", "backend.cpp")
_NAME = "_emulator"


def compiler() -> str | None:
    """Return what the emulator is built with, if it is there."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Build the extension, unless it has been, and return its file; about a quarter of a minute.

    Raises:
        RuntimeError: The compiler failed; the message holds what it said.
    """
    digest = hashlib.sha256(f"{torch.__version__} {torch.__file__} {_FLAGS}".encode())
    for name in ("emulator.h", *_SOURCES):
        digest.update((_HERE / name).read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch-join" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{_NAME}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may build it; the lock goes with that process
        if not library.exists():
            _build(folder, library)
    return library


def load(library: Path) -> ModuleType:
    """Import the extension."""
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_FLAGS = (
    "-std=c++20", "-O0", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={_NAME}", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-I{sysconfig.get_paths()['include']}",
    *(f"-I{path}" for path in cpp_extension.include_paths()),
    # Older torch (2.6) says what its bindings are made with, which others have to be made with too.
    *(f'-D{name[1:]}="{getattr(torch._C, name)}"' for name in dir(torch._C) if name.startswith("_PYBIND11_")),
)  # fmt: skip


def _build(folder: Path, library: Path) -> None:
    gxx = compiler()
    assert gxx is not None
    objects = [folder / f"{source}.o" for source in _SOURCES]
    commands = [
        [gxx, *_FLAGS, "-c", str(_HERE / source), "-o", str(o)] for source, o in zip(_SOURCES, objects, strict=True)
    ]
    _run(*commands)
    found = cpp_extension.library_paths()
    libraries = [*(f"-L{path}" for path in found), "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    unfinished = library.with_suffix(".unfinished")
    _run(
        [
            gxx,
            "-shared",
            *map(str, objects),
            "-o",
            str(unfinished),
            *libraries,
            *(f"-Wl,-rpath,{path}" for path in found),
        ]
    )
    unfinished.rename(library)


def _run(*commands: list[str]) -> None:
    """Run these at the same time."""
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for command in commands]
    said = [process.communicate()[0].decode() for process in running]
    for process, command, text in zip(running, commands, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{text}")
