"""How the sources are laid out, and that `scripts/structure.py`, which holds it, can fail."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import accelerate_join
import lightning_join
import torch_join
import torch_join.integration
from scripts import structure

ROOT = Path(structure.__file__).parent.parent

PUBLIC = {
    torch_join: [
        "EarlyTerminationError",
        "Join",
        "JoinError",
        "JoinTimeoutError",
        "JoinTypeError",
        "JoinValueError",
        "JoinableMetric",
        "JoinableModel",
        "JoinableOptimizer",
        "JoinableState",
        "PeerFailedError",
        "UnpaddedDistributedSampler",
        "UnsupportedError",
        "Weighting",
        "windows",
    ],
    torch_join.integration: [
        "Begin",
        "Changes",
        "Channel",
        "Count",
        "Driver",
        "EpochRecord",
        "Lockstep",
        "LockstepJoin",
        "LoopDriver",
        "MeetingPoint",
        "ModelShadow",
        "ModuleMetrics",
        "Part",
        "RankRecord",
        "ReadStep",
        "Reader",
        "Rebalancer",
        "Rebalancing",
        "RefillGuard",
        "StepDriver",
        "StepMirror",
        "check_can_rebalance",
        "check_names",
        "check_timeout",
        "closed",
        "draws_exactly",
        "driver_of",
        "early_termination",
        "engine_lockstep_join",
        "factor_of_count",
        "follow_engine",
        "follow_sharded_model",
        "group_options",
        "holds_parts",
        "in_backward",
        "is_closed",
        "is_communication_error",
        "is_engine",
        "is_length_certain",
        "is_sharded_model",
        "join_rows",
        "leads_to",
        "listed",
        "name_ranks",
        "naming_missing",
        "open_channel",
        "own_loops",
        "refuse_position",
        "resolve_weighting",
        "setting",
        "sharded_lockstep_join",
        "steps_of",
        "take_group_options",
        "telling_failures",
        "use_device",
    ],
    lightning_join: [
        "DDPJoinStrategy",
        "DeepSpeedJoinStrategy",
        "FSDPJoinStrategy",
        "JoinCallback",
        "JoinMonitor",
        "ModelParallelJoinStrategy",
    ],
    accelerate_join: ["Accelerator", "JoinError", "join_batches", "join_uneven_inputs"],
}


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names(module: Any) -> None:
    assert structure.public(structure.Module(ROOT, Path(module.__file__))) == PUBLIC[module]
    assert all(hasattr(module, name) for name in PUBLIC[module])


def test_public_names_of_join() -> None:
    model = torch.nn.Linear(1, 1)
    for join in (torch_join.Join, torch_join.Join([model, torch.optim.SGD(model.parameters(), 0.1)])):
        public = [name for name in dir(join) if not name.startswith("_")]
        assert public == [
            "active_ranks",
            "all_gather",
            "backward_collectives",
            "batch_owner",
            "batches",
            "joined",
            "notify_join_context",
            "owner_batch_idx",
            "step",
        ]


def test_the_repository_is_laid_out_as_the_rules_say() -> None:
    assert structure.violations(ROOT) == []


def write(root: Path, files: dict[str, str]) -> Path:
    """Write a tree of sources, and what each wing's docstring must say."""
    for package, wings in structure.WINGS.items():
        for wing, allowed in wings.items():
            names = ", ".join(f"`{name}`" for name in allowed) or "nothing"
            files = {f"{package}/{wing}/__init__.py": f'"""A wing.\n\nMay import: {names}.\n"""', **files}
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


def found(root: Path, rule: Any, files: dict[str, str]) -> list[str]:
    """Return what a rule says of a tree."""
    return [*rule(structure.House(write(root, files)))]


# How one module can import another.
IMPORTS = [
    "import torch_join._base.two",
    "import torch_join._base.two as other",
    "from torch_join._base import two",
    "from torch_join._base.two import name",
    "from torch_join._base.two import *",
    "from . import two",
    "from .two import name as other",
    "from ..  _base.two import name",
    "import torch_join\nx = torch_join._base.two.name()",
    "from torch_join import _base\nx: _base.two.Name",
    "if TYPE_CHECKING:\n    from torch_join._base.two import Name",
    "def f():\n    from torch_join._base.two import name",
    "try:\n    pass\nfinally:\n    from torch_join._base import two",
    "x: 'list[torch_join._base.two.Name]'",
    "import sys\nx = sys.modules['torch_join._base.two']",
    "import importlib\nimportlib.import_module('torch_join._base.two')",
    "import importlib\nx = importlib.import_module('torch_join._base.two').name",
    "from importlib import import_module as load\nx = load('.two', 'torch_join._base')",
    "__import__('torch_join._base.two')",
    "exec('from torch_join._base.two import name')",
]


@pytest.mark.parametrize("source", IMPORTS)
def test_a_circle_is_found(source: str, tmp_path: Path) -> None:
    files = {"torch_join/_base/one.py": source, "torch_join/_base/two.py": "import torch_join._base.one"}
    expected = ["2 modules import each other in a circle: torch_join._base.one, torch_join._base.two"]
    assert found(tmp_path, structure.no_circles, files) == expected


def test_a_long_circle_through_packages_and_what_they_hand_on_is_found(tmp_path: Path) -> None:
    files = {
        "torch_join/__init__.py": "from torch_join.join import Join",
        "torch_join/join.py": "def f():\n    from lightning_join import g",
        "lightning_join/__init__.py": "from lightning_join._x import g",
        "lightning_join/_x.py": "from torch_join import Join",
    }
    (circle,) = found(tmp_path, structure.no_circles, files)
    assert circle.endswith(": lightning_join, lightning_join._x, torch_join, torch_join.join")


def test_what_is_no_circle(tmp_path: Path) -> None:
    files = {
        "torch_join/__init__.py": "from torch_join._base.two import name",
        "torch_join/_base/one.py": '"""See torch_join._base.two."""\nKEY = "torch_join", "torch_join.pt"',
        "torch_join/_base/two.py": "from torch_join._base import one",
    }
    assert found(tmp_path, structure.no_circles, files) == []


@pytest.mark.parametrize(
    "call", ["import_module(name)", "import_module('torch_join.' + name)", "import_module(f'{x}')"]
)
def test_an_import_whose_name_is_not_written_is_found(call: str, tmp_path: Path) -> None:
    files = {"torch_join/join.py": f"import importlib\nimportlib.{call}"}
    expected = ["torch_join/join.py:2: imports a module whose name is not written there"]
    assert found(tmp_path, structure.no_circles, files) == expected


WINGS = [
    ("_base/x.py", "from torch_join._control.channel import Channel", ":1: _base may not import {_control.channel}"),
    ("_base/x.py", "def f():\n    import torch_join._tail", ":2: _base may not import {_tail}"),
    ("_base/x/y.py", "from torch_join import _tail", ":1: _base may not import {_tail}"),
    ("_shadow/x.py", "from torch_join._collectives import tap", ":1: _shadow may not import {_collectives}"),
    ("joinables/x.py", "from torch_join.join import Join", ":1: joinables may not import {join}"),
    ("_tail/x.py", "from torch_join import Join", ":1: _tail may not import torch_join"),
    ("_new/x.py", "", ": _new is not in the tables of scripts/structure.py"),
    ("new.py", "", ": new is not in the tables of scripts/structure.py"),
    ("_base/__init__.py", '"""A wing."""', ": says that it may import ['nothing said'], and the table []"),
    (
        "_control/__init__.py",
        '"""A wing.\n\nMay import: `_base`, `_tail`. Begin with `x`.\n"""',
        ": says that it may import ['_base', '_tail'], and the table ['_base']",
    ),
]


@pytest.mark.parametrize(("where", "source", "expected"), WINGS)
def test_an_import_of_a_wing_that_the_table_does_not_allow_is_found(
    where: str, source: str, expected: str, tmp_path: Path
) -> None:
    files = {
        "torch_join/__init__.py": "",
        "torch_join/join.py": "from torch_join._tail import server\nfrom torch_join._base import x",
        "torch_join/_control/channel.py": "from torch_join._base import x",
        f"torch_join/{where}": source,
    }
    expected = expected.replace("{", "torch_join.").replace("}", "")
    found_ones = found(tmp_path, structure.wings, files)
    assert found_ones == [f"torch_join/{where}{expected}"]


def test_tables_of_the_other_packages_hold_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(structure.WINGS, "lightning_join", {"_compat": (), "_loops": ("_compat",)})
    monkeypatch.setitem(structure.FACE, "lightning_join", ("_strategy",))
    files = {
        "lightning_join/_compat.py": "import lightning_join._loops.fit",
        "lightning_join/_loops/fit.py": "import lightning_join._compat, lightning_join._strategy",
        "lightning_join/_strategy.py": "import lightning_join._loops.fit",
        "lightning_join/_other.py": "",
    }
    assert found(tmp_path, structure.wings, files) == [
        "lightning_join/_compat.py:1: _compat may not import lightning_join._loops.fit",
        "lightning_join/_loops/fit.py:1: _loops may not import lightning_join._strategy",
        "lightning_join/_other.py: _other is not in the tables of scripts/structure.py",
    ]


FACES = [
    ("lightning_join", "from torch_join._tail.server import Server", "lightning_join may not import {}._tail.server"),
    ("lightning_join", "from torch_join import join", "lightning_join may not import {}.join"),
    ("lightning_join", "import torch_join\nx = torch_join.join.Join", "lightning_join may not import {}.join"),
    ("lightning_join", "from torch_join import name_ranks", "name_ranks is no public name of {}"),
    ("lightning_join", "import torch_join\ntorch_join._hidden()", "_hidden is no public name of {}"),
    ("accelerate_join", "from torch_join.integration import Join", "Join is no public name of {}.integration"),
    ("accelerate_join", "from torch_join import integration as i\ni.x", "x is no public name of {}.integration"),
    ("accelerate_join", "def f():\n    import lightning_join", "accelerate_join may not import lightning_join"),
    ("lightning_join", "import accelerate_join", "lightning_join may not import accelerate_join"),
    ("torch_join", "import accelerate_join", "torch_join may not import accelerate_join"),
    ("torch_join", "x = 'lightning_join._x'", "torch_join may not import lightning_join._x"),
]


@pytest.mark.parametrize(("package", "source", "expected"), FACES)
def test_an_import_of_what_another_package_does_not_offer_is_found(
    package: str, source: str, expected: str, tmp_path: Path
) -> None:
    files = {
        "torch_join/__init__.py": "from torch_join.join import Join\n__all__ = ['Join']",
        "torch_join/join.py": "",
        "torch_join/integration.py": "from torch_join.join import Join as _Join, name_ranks\nimport os",
        "torch_join/_tail/server.py": "",
        "lightning_join/__init__.py": "",
        "lightning_join/_x.py": "",
        "accelerate_join/__init__.py": "from torch_join import Join\nfrom torch_join.integration import name_ranks",
        f"{package}/join.py": source,
    }
    line = source.count("\n") + 1
    expected = f"{package}/join.py:{line}: {expected.format('torch_join')}"
    assert found(tmp_path, structure.public_names, files) == [expected]


@pytest.mark.parametrize(("floors", "expected"), [(14, False), (15, True)])
def test_too_many_floors_are_found(floors: int, expected: bool, tmp_path: Path) -> None:
    files = {f"lightning_join/_{i:02}.py": f"import lightning_join._{i + 1:02}" for i in range(floors)}
    files |= {"lightning_join/_00.py": files["lightning_join/_00.py"] + ", torch_join.join", "torch_join/join.py": ""}
    chain = " < ".join(f"lightning_join._{i:02}" for i in reversed(range(floors)))
    lines = [f"lightning_join: {floors} floors, 14 at most: {chain}"] if expected else []
    assert found(tmp_path, structure.few_floors, files) == lines


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({f"torch_join/_base/{i}.py": "" for i in range(14)}, []),
        ({f"torch_join/_base/{i}.py": "" for i in range(15)}, ["torch_join/_base: 15 files, 14 at most"]),
        ({f"accelerate_join/{i}.py": "" for i in range(15)}, ["accelerate_join: 15 files, 14 at most"]),
        ({f"tests/core/{i}.py": "" for i in range(20)} | {"tests/core/__init__.py": ""}, []),
        ({f"tests/core/{i}.py": "" for i in range(21)}, ["tests/core: 21 files, 20 at most"]),
        ({"lightning_join/x.py": "\n" * 700}, []),
        ({"lightning_join/x.py": "\n" * 701}, ["lightning_join/x.py: 701 lines, 700 at most"]),
    ],
)
def test_large_folders_and_files_are_found(files: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    assert found(tmp_path, structure.small_files, files) == expected


CLASSES = [
    ("class C(B): pass", "3 classes, 2 at most: A < B < C"),
    ("class C(torch.Module, B[int]): pass", "3 classes, 2 at most: A < B < C"),
    ("Base = B\nclass C(Base): pass", "3 classes, 2 at most: A < B < C"),
    ("def f():\n    class C(B): pass", "3 classes, 2 at most: A < B < C"),
    ("class B(B): pass", "3 classes, 2 at most: A < B < B"),
    ("import torch_join as t\nclass C(t.B): pass", "3 classes, 2 at most: A < B < C"),
    ("class C(A): pass\nclass D(C): pass", "3 classes, 2 at most: A < C < D"),
    ("class C(A, P): pass", None),
    ("class C(P, Protocol): pass\nclass D(C): pass\nclass E(D): pass", None),
    ("class C(torch.Module): pass\nclass D(C): pass", None),
    ("class C(ValueError): pass\nclass D(C): pass\nclass E(D): pass\nclass F(E, A): pass", None),
    ("class C:\n    def __getattr__(self, name): pass", "C has a __getattr__"),
    ("class C:\n    __getattribute__ = f", "C has a __getattribute__"),
]


@pytest.mark.parametrize(("source", "expected"), CLASSES)
def test_deep_classes_are_found(source: str, expected: str | None, tmp_path: Path) -> None:
    files = {
        "torch_join/__init__.py": "from torch_join._base.b import A, B, P",
        "torch_join/_base/a.py": "from typing import Protocol\nclass P(Protocol): pass\nclass A(P): pass",
        "torch_join/_base/b.py": "from torch_join._base.a import A, P\nclass B(A): pass",
        "lightning_join/c.py": f"from typing import Protocol\nfrom torch_join import A, B, P\nimport torch\n{source}",
    }
    line = 4 + source[: max(source.rfind("class "), 0)].count("\n")
    lines = [] if expected is None else [f"lightning_join/c.py:{line}: {expected}"]
    assert found(tmp_path, structure.flat_classes, files) == lines


def test_a_getattr_that_the_table_names_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(structure.GETATTR, "torch_join/join.py: C", "it stands in for a loader of any kind")
    files = {"torch_join/join.py": "class C:\n    def __getattr__(self, name): pass"}
    assert found(tmp_path, structure.flat_classes, files) == []


PRIVATE = [
    ("join._driver", True),
    ("getattr(join, '_driver')", True),
    ("self._driver", True),  # of a base of torch_join's
    ("super()._driver", True),
    ("join._of_lightning", False),
    ("self._driver = 1\nself._driver", False),
    ("join.__init__", False),
    ("join._timeout", False),  # Lightning's, see `THEIRS`
]


@pytest.mark.parametrize(("source", "expected"), PRIVATE)
def test_private_names_of_torch_join_are_found(source: str, expected: bool, tmp_path: Path) -> None:
    files = {"torch_join/join.py": "self._driver = self._timeout = 1\nself._driver.x", "accelerate_join/x.py": source}
    lines = ["accelerate_join/x.py:1: _driver is private in torch_join"] if expected else []
    assert found(tmp_path, structure.private_names, files) == lines


def test_the_program_prints_each_violation_once_and_fails(tmp_path: Path) -> None:
    files = {
        "torch_join/__init__.py": "__all__ = []",
        "torch_join/_base/x.py": "import torch_join._tail.x",
        "torch_join/_tail/x.py": "import torch_join._base.x",
        "lightning_join/_strategy.py": "import torch_join\nclass A:\n    _a = 1",
        "lightning_join/_callback.py": "import lightning_join._strategy as a\nclass B(a.A): pass\nclass C(B): pass",
        "accelerate_join/_context.py": "from torch_join import y, y, _base\nz._driver, z._driver",
        "torch_join/join.py": "_driver = 1",
        **{f"tests/{i}.py": "" for i in range(21)},
        **{f"torch_join/_base/_{i:02}.py": f"import torch_join._base._{i + 1:02}" for i in range(15)},
    }
    root = str(write(tmp_path, files))
    done = subprocess.run([sys.executable, structure.__file__, root], capture_output=True, text=True)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line[:60] for line in lines] == [
        "2 modules import each other in a circle: torch_join._base.x, torch_join._tail.x"[:60],
        "torch_join/_base/x.py:1: _base may not import torch_join._tail.x"[:60],
        "accelerate_join/_context.py:1: accelerate_join may not import torch_join._base"[:60],
        "accelerate_join/_context.py:1: y is no public name of torch_join"[:60],
        "torch_join: 16 floors, 14 at most: torch_join._base < torch_join._base._14"[:60],
        "torch_join/_base: 16 files, 14 at most",
        "tests: 21 files, 20 at most",
        "lightning_join/_callback.py:3: 3 classes, 2 at most: A < B < C"[:60],
        "accelerate_join/_context.py:2: _driver is private in torch_join"[:60],
    ]


def test_the_program_is_content_with_a_small_tree(tmp_path: Path) -> None:
    root = str(write(tmp_path, {"torch_join/join.py": "from torch_join._base import weighting"}))
    done = subprocess.run([sys.executable, structure.__file__, root], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_scripts_check_runs_the_program() -> None:
    assert ".venv/bin/python scripts/structure.py\n" in (ROOT / "scripts" / "check").read_text()
