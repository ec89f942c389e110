"""A job of Ray Train in a process of its own, under a deadline: its workers run one function after the other.

Ray's start takes longer than what they do. Each function gets a process group of its own, so that one that fails
spoils no other.
"""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.workers import DeadlineError, Outcome

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 3


def run(module: str, names: Sequence[str], deadline: float, failures: int = 0) -> dict[str, list[Outcome]]:
    """Run functions of a module on three workers, each as `function(rank)`, and return what they did.

    Args:
        module: Its name.
        names: Those of the functions.
        deadline: Seconds after which everything is killed.
        failures: How often Ray starts its workers again.

    Raises:
        DeadlineError: They were not done in time.
    """
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        command = [sys.executable, "-m", "tests.ray.job", folder, str(failures), module, *names]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
        with open(Path(folder) / "log", "w+") as log:
            job = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                job.wait(deadline)
            except subprocess.TimeoutExpired:
                job.send_signal(signal.SIGINT)  # Ray ends its processes, which are in sessions of their own
                try:
                    job.wait(10)
                except subprocess.TimeoutExpired:
                    job.kill()
                raise DeadlineError(f"not done in {deadline} s:\n{_end_of(log)}") from None
            found = {name: [_outcome(folder, name, rank) for rank in range(WORKERS)] for name in names}
            missing = Outcome(error=f"it did not come to its end:\n{_end_of(log)}")
            return {name: [each or missing for each in outcomes] for name, outcomes in found.items()}


def _end_of(log: Any) -> str:
    log.seek(0)
    return str(log.read()[-8000:])


def _outcome(folder: str, name: str, rank: int) -> Outcome | None:
    path = Path(folder) / f"{name}.{rank}"
    outcome: Outcome | None = pickle.loads(path.read_bytes()) if path.exists() else None
    return outcome


def work(config: dict[str, Any]) -> None:
    """Run all functions, on a worker."""
    import ray.train
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, folder = ray.train.get_context().get_world_rank(), config["folder"]
    module = importlib.import_module(config["module"])
    for number, name in enumerate(config["names"]):
        dist.destroy_process_group()
        place = f"file://{folder}/group{number}.{os.environ['MASTER_PORT']}"  # which is new after a restart
        dist.init_process_group("gloo", place, timedelta(seconds=60), WORKERS, rank)
        try:
            outcome = Outcome(getattr(module, name)(rank))
        except Exception as error:
            if config["failures"]:
                raise
            outcome = Outcome(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        (Path(folder) / f"{name}.{rank}").write_bytes(pickle.dumps(outcome))


def main(folder: str, failures: str, module: str, *names: str) -> None:
    import ray
    import ray.data
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from torch_join.ray import UnequalShards

    names_of = ("PYTHONPATH", "OMP_NUM_THREADS")
    ray.init(
        num_cpus=WORKERS + 1,
        object_store_memory=150_000_000,
        include_dashboard=False,
        logging_level="warning",
        runtime_env={"env_vars": {name: os.environ[name] for name in names_of}},
    )
    # 61 rows for three workers.
    rows = ray.data.range(61, override_num_blocks=5)
    config = {"folder": folder, "failures": int(failures), "module": module, "names": names}
    TorchTrainer(
        work,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=False),
        torch_config=TorchConfig(backend="gloo", timeout_s=60),
        datasets={"rows": rows},
        dataset_config=UnequalShards(),
        run_config=RunConfig(
            storage_path=str(Path(folder) / "storage"), failure_config=FailureConfig(max_failures=int(failures))
        ),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
