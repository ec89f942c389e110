"""The packages: their public names, what they import, what tests know of their inside."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import accelerate_join
import lightning_join
import pytorch_lightning_join
import torch_join
import torch_join.integration
from scripts import structure
from scripts.structure import is_private
from tests.support.commands import once

ROOT = Path(__file__).parents[2]
PACKAGES = [torch_join, lightning_join, pytorch_lightning_join, accelerate_join]


PUBLIC = {
    torch_join: """
        EarlyTerminationError Join JoinDataWarning JoinDriftWarning JoinError JoinMonitor JoinPerformanceWarning
        JoinTimeoutError JoinTypeError JoinValueError JoinWarning JoinableMetric JoinableModel JoinableOptimizer
        JoinableState PeerFailedError UnpaddedDistributedSampler UnsupportedError Weighting windows
    """,
    torch_join.integration: """
        VERSION Begin Beginning Changes Channel Count Deal Dealer Dealt Driver EpochRecord Evened EvenedLoader
        FileRows Hook JoinOptions LoaderPlace Lockstep LockstepJoin LoopDriver ModelShadow ModuleMetrics Often Options
        Order Participant Placeholder PlaceholderLockstep Position RankRecord ReadStep Reader Rebalancing RefillGuard
        Resuming RowsPart SideBySide StepDriver StepMirror StopSignals Stopwatch broadcast by_old_name check_monitored
        check_names closed dealer_of dealt dealt_again draws_exactly draws_globally driver_of factor_of_count
        follow_sharded_model forget_states gather_given gather_in_order gather_objects global_kept group_options
        has_epoch holds_parts in_backward in_turn is_closed is_communication_error is_engine is_length_certain
        is_sharded_model join_rows join_with keeps_place leads_to length_of listed make_placeholder name_ranks
        naming_missing open_channel own_loops place_of_state read_rows refuse_misspelt refuse_position renamed
        resumed_at runs_in_ray sampler_of set_own setting sharded_lockstep_join showing_options state_of steps_of
        take_group_options telling_failures told_epochs use_device warn_renamed whole_signature without_rows
    """,
    lightning_join: """
        DDPJoinStrategy DeepSpeedJoinStrategy EarlyTerminationError FSDPJoinStrategy JoinCallback JoinError
        JoinMonitor JoinPredictionWriter JoinTimeoutError JoinTypeError JoinValueError ModelParallelJoinStrategy
        PeerFailedError UnsupportedError gather_in_order gather_predictions read_predictions
    """,
    accelerate_join: """
        Accelerator EarlyTerminationError JoinError JoinTimeoutError JoinTypeError JoinValueError
        PeerFailedError UnsupportedError gather_in_order join_batches join_uneven_inputs
    """,
}


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names(module: Any) -> None:
    assert module.__all__ == PUBLIC[module].split()
    assert all(hasattr(module, name) for name in module.__all__)


def test_public_names_of_join() -> None:
    model = torch.nn.Linear(1, 1)
    names = "active_ranks all_gather backward_collectives batch_owner batches gather gather_in_order joined"
    names += " load_state_dict notify_join_context owner_batch_idx state_dict step stop_requested weigh"
    for join in (torch_join.Join, torch_join.Join([model, torch.optim.SGD(model.parameters(), 0.1)])):
        assert [name for name in dir(join) if not name.startswith("_")] == names.split()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_all_is_what_is_public(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    public = [
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and type(value).__name__ != "module" and name not in ("StrategyRegistry",)
    ]
    assert names == sorted(names)
    assert names == sorted(public)


def test_versions_agree() -> None:
    assert len({package.__version__ for package in PACKAGES}) == 1


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_packages_are_typed(package: object) -> None:
    assert (Path(package.__file__).parent / "py.typed").exists()  # type: ignore[attr-defined]


# Of torch, Lightning, torchmetrics, TRL and named tuples: ours have attributes of these names too, which a scan cannot
# tell apart.
THEIRS = {
    *("_join_config", "_on_after_fetch", "_on_before_fetch", "_results", "_timeout", "_update_count"),
    *("_all_gather_comm", "_config", "_handle", "_metrics", "_replace", "_setup_model", "_should_accumulate"),
}


SOURCES = [path for package in PACKAGES for path in Path(str(package.__file__)).parent.rglob("*.py")]
MODULES = {path.stem for path in SOURCES} | {path.parent.name for path in SOURCES}  # which may be imported


def private_names() -> set[str]:
    """Return the private names that the packages define: of functions, classes, variables and attributes."""
    return {name for path in SOURCES for name in structure.defined(ast.parse(path.read_text())) if is_private(name)}


def reached_into(source: str, private: set[str]) -> list[str]:
    """Return the private names that a source asks others for: by attribute, `getattr` and the like, or import."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names if alias.name not in MODULES]
    names += [name for _, name in structure.reached_into(tree, private)]
    return [name for name in names if name in private - THEIRS]


def test_what_tests_know_of_the_inside_is_in_one_file() -> None:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "inside.py"]
    private = private_names()
    assert {path.name: found for path in paths if (found := reached_into(path.read_text(), private))} == {}


def test_the_scan_for_private_names_can_fail() -> None:
    source = """
from torch_join._control import codec as _codec
from torch_join._handover.transfer import _LARGE
join._channel._store.num_keys()
monkeypatch.setattr(_digest, "_tiles", None)
model._join_config, self._said, torch._unknown
"""
    assert {*reached_into(source, private_names())} == {"_LARGE", "_channel", "_store", "_tiles"}


FORBIDDEN = {
    "torch_join": ("lightning", "lightning_join", "accelerate", "accelerate_join", "torchmetrics", "pytorch_lightning"),
    "lightning_join": ("accelerate", "accelerate_join", "pytorch_lightning"),
    "pytorch_lightning_join": ("accelerate", "accelerate_join", "lightning", "lightning_join"),
    "accelerate_join": ("lightning", "lightning_join", "pytorch_lightning"),
}
LOADED = "import sys, {package}; print([name for name in {names!r} if name in sys.modules])"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_dependencies_run_one_way(package: str) -> None:
    script = LOADED.format(package=package, names=FORBIDDEN[package])
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_the_test_of_dependencies_can_fail() -> None:
    script = LOADED.format(package="torch_join", names=("torch",))
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "['torch']"


def test_importing_changes_nothing_global() -> None:
    script = (
        "import os, warnings, logging, lightning.pytorch\n"
        "before = dict(os.environ), list(warnings.filters), list(logging.getLogger().handlers)\n"
        "import lightning_join\n"
        "print(before == (dict(os.environ), list(warnings.filters), list(logging.getLogger().handlers)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


# What is taken away, and how the error calls it: a name that is imported, and one that objects must have.
GONE = {
    "torch_join": [
        ("torch.nn.parallel.distributed._find_tensors", "cannot import name '_find_tensors'"),
        ("torch.distributed._broadcast_coalesced", "torch.distributed._broadcast_coalesced"),
    ],
    "lightning_join": [
        ("lightning.pytorch.loops.progress._BatchProgress", "cannot import name '_BatchProgress'"),
        (
            "lightning.pytorch.loops._EvaluationLoop._store_dataloader_outputs",
            "_EvaluationLoop._store_dataloader_outputs",
        ),
        ("lightning.fabric.utilities.data._set_sampler_epoch", "cannot import name '_set_sampler_epoch'"),
    ],
    "lightning_join.fabric": [("lightning.fabric.wrappers._unwrap_objects", "cannot import name '_unwrap_objects'")],
    "pytorch_lightning_join": [
        ("pytorch_lightning.loops.progress._BatchProgress", "cannot import name '_BatchProgress'"),
        ("pytorch_lightning.strategies.DDPStrategy.determine_ddp_device_ids", "DDPStrategy.determine_ddp_device_ids"),
    ],
    "accelerate_join": [
        ("accelerate.utils.operations._gpu_gather", "module 'accelerate.utils.operations' has no attribute"),
        ("accelerate.state.PartialState", "cannot import name 'PartialState'"),
    ],
}
CASES = [(package, *case) for package, cases in GONE.items() for case in cases]
WITHOUT = """
owner, _, name = {name!r}.rpartition(".")
# The framework's own modules that use the name have it already.
delattr(pkgutil.resolve_name(owner), name)
import {package}
"""
NEWER = {
    "torch": "torch_join",
    "lightning": "lightning_join, lightning_join.fabric",
    "pytorch_lightning": "pytorch_lightning_join",
    "accelerate": "accelerate_join",
    "transformers": "accelerate_join.transformers",
}
RAISED = """
own = importlib.metadata.version
importlib.metadata.version = lambda name: "99.0.dev1" if name == {framework!r} else own(name)
warnings.simplefilter("always")
os.environ["RANK"] = {rank!r}
import {packages}
"""
IN_TURN = """
import accelerate, importlib.metadata, lightning.pytorch, os, pkgutil, pytorch_lightning, traceback, warnings
for name, script in {scripts!r}.items():
    if os.fork():  # importing the frameworks takes long
        os.wait()
        continue
    os.dup2(os.open(os.path.join({folder!r}, name), os.O_CREAT | os.O_WRONLY), 2)
    try:
        exec(script)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)  # a usual end would take apart all that was imported
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what is written to stderr in each of the cases."""
    scripts = {name: WITHOUT.format(package=package, name=name) for package, name, _ in CASES}
    for framework, packages in NEWER.items():
        for rank in ("0", "1"):
            script = RAISED.format(framework=framework, packages=packages, rank=rank)
            scripts[f"{framework} on rank {rank}"] = script

    def write(folder: Path) -> None:
        script = IN_TURN.format(scripts=scripts, folder=str(folder))
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)

    return once(tmp_path_factory, "said", write)


@pytest.mark.parametrize(("package", "name", "text"), CASES)
def test_a_private_name_that_has_gone_is_told_as_a_package_is_imported(
    said: Path, package: str, name: str, text: str
) -> None:
    stderr = (said / name).read_text()
    error = stderr.strip().splitlines()[-1]
    framework = name.partition(".")[0]
    assert error.startswith(f"torch_join._base.errors.UnsupportedError: {framework} "), stderr
    assert f" lacks {text}" in error
    assert "which this package needs" in error
    assert f"Install {framework} 2." in error or f"Install {framework} 1." in error
    assert error.endswith("or a newer version of this package.")


@pytest.mark.parametrize("framework", NEWER)
def test_a_newer_version_is_used_with_one_warning_in_a_job(said: Path, framework: str) -> None:
    pytest.importorskip(framework)
    for rank, count in ((0, 1), (1, 0)):
        stderr = (said / f"{framework} on rank {rank}").read_text()
        assert "Traceback" not in stderr, stderr
        assert stderr.count(f" {framework} 99.0.dev1 is newer than the versions") == count, stderr
