"""What Fabric sets up besides one model and one optimizer under DDP, against one process in float64."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import FSDPPrecision, Precision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import fsdp as fabric_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import lightning_join
from lightning_join.fabric import DDPJoinStrategy, FSDPJoinStrategy, ModelParallelJoinStrategy
from tests.support.front_ends.fabric import fabric_of, to_the_end
from tests.support.sharded_fits import Double, _whole_state, on_cpus
from tests.support.small import step_on, steps_of
from tests.support.workers import Workers
from torch_join import JoinError

ROOT = Path(__file__).parents[2]
LENGTHS = ((1, 4), (0, 3, 2))


class Net(pl.LightningModule):
    """A module of Lightning's, with methods that are no `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())  # type: ignore[no-any-return]

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()  # type: ignore[no-any-return]

    def loss(self, x: Tensor) -> Tensor:
        return self.training_step(x)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batches_of(lengths: tuple[int, ...], rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [*torch.randn(lengths[rank], 2, 3, generator=generator, dtype=torch.float64)]


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def alone(lengths: tuple[int, ...], clip: float = 0.0) -> dict[str, Tensor]:
    """Train one process by `Net.loss`, each rank's share weighted by 1 / world size."""
    module = net()
    optimizer = adam(module)
    for places in 2 * steps_of(lengths):
        losses = (module.loss(batches_of(lengths, rank)[step]) / len(lengths) for rank, step in places)
        step_on(losses, optimizer, clip=clip)
    return module.state_dict()


class Scaled(Precision):
    """Scales the loss, as mixed precision in float16 does."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(self.scaler.scale(tensor), model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self.scaler.step(optimizer)
        self.scaler.update()


def train(rank: int, lengths: tuple[int, ...], how: str) -> Any:
    options = {"plugins": Scaled()} if how == "scaler" else {}
    fabric = fabric_of(len(lengths), DDPJoinStrategy(), **options)
    module = net()
    if how == "apart":
        model, optimizer = fabric.setup_module(module), fabric.setup_optimizers(adam(module))
    elif how == "compiled":
        model, optimizer = fabric.setup(torch.compile(module, backend="eager"), adam(module))
    else:
        model, optimizer = fabric.setup(module, adam(module))
    if how == "marked":
        model.mark_forward_method("loss")
    loader = fabric.setup_dataloaders(
        torch.utils.data.DataLoader(batches_of(lengths, rank), batch_size=None),  # type: ignore[arg-type]
        use_distributed_sampler=False,
    )
    for _ in range(2):
        for batch in loader:
            if how == "marked":
                loss = model.loss(batch)
            elif how == "training_step":
                loss = model.training_step(batch)
            else:
                loss = model(batch).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    fabric.barrier()
    return module.state_dict(), fabric.strategy.precision.scaler.get_scale() if how == "scaler" else 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("how", ["apart", "compiled", "marked", "training_step", "scaler"])
def test_ways_to_set_up(workers: Workers, how: str, lengths: tuple[int, ...]) -> None:
    expected = alone(lengths)
    found = workers.run(len(lengths), to_the_end, train, lengths, how)
    assert len({scale for _, scale in found}) == 1
    for state, _ in found:
        assert all(torch.equal(value, found[0][0][name]) for name, value in state.items())
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


def parallelize(module: Net, mesh: Any) -> Net:
    for part in (module.first, module):
        fully_shard(part, mesh=mesh["data_parallel"])
    return module


class DoubleInFabric(FSDPPrecision):
    """The same for Fabric, whose class is another one."""

    mixed_precision_config = None  # type: ignore[assignment]
    convert_module, convert_input, convert_output = Double.convert_module, Double.convert_input, Double.convert_input
    forward_context = tensor_init_context = module_init_context = Double.forward_context  # type: ignore[assignment]


def train_sharded(rank: int, *args: Any) -> Any:
    with on_cpus(), mock.patch.object(fabric_fsdp, "_get_full_state_dict_context", _whole_state):
        return train_on_cpus(rank, *args)


def train_on_cpus(rank: int, lengths: tuple[int, ...], api: str, clip: float, folder: str) -> Any:
    strategy: Any
    if api == "fsdp":
        wraps = {"auto_wrap_policy": {nn.Linear}, "use_orig_params": True}
        strategy = FSDPJoinStrategy(**wraps, state_dict_type="full", precision=DoubleInFabric("32-true"))
    else:
        strategy = ModelParallelJoinStrategy(parallelize, len(lengths), 1, save_distributed_checkpoint=False)
    fabric = fabric_of(len(lengths), strategy)
    module = net()
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(adam(model))
    loader: Any = torch.utils.data.DataLoader(batches_of(lengths, rank), batch_size=None)  # type: ignore[arg-type]
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    for epoch in range(2):
        for step, batch in enumerate(loader):
            fabric.backward(model(batch).square().mean())
            if clip:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
            if epoch == 1 and step == max(lengths) - 1:
                fabric.save(Path(folder) / "last.ckpt", {"model": model, "step": step})
    fabric.barrier()
    options = StateDictOptions(full_state_dict=True)
    return {name: value.clone() for name, value in get_model_state_dict(model._forward_module, options=options).items()}


@pytest.mark.parametrize(("lengths", "clip"), [(LENGTHS[0], 0.0), (LENGTHS[1], 0.2)])
@pytest.mark.parametrize("api", ["fsdp", "fully_shard"])
def test_sharded_models(workers: Workers, api: str, lengths: tuple[int, ...], clip: float, tmp_path: Path) -> None:
    clip = clip if api == "fully_shard" else 0.0  # FSDP takes norms in float32
    expected = alone(lengths, clip)
    for state in workers.run(len(lengths), to_the_end, train_sharded, lengths, api, clip, str(tmp_path)):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["step"] == max(lengths) - 1
    for name, value in expected.items():
        torch.testing.assert_close(saved["model"][name], value, rtol=0, atol=1e-10)


def set_up_unsharded(rank: int) -> None:
    fabric_of(2, "model_parallel_join").setup_module(nn.Linear(2, 1))


def test_a_model_that_nothing_shards_raises(workers: Workers) -> None:
    for outcome in workers.outcomes(2, to_the_end, set_up_unsharded):
        assert "Linear has no sharded module" in outcome.error


def test_every_name_that_ddp_has() -> None:
    names = {"ddp_join", "ddp_join_spawn", "ddp_join_fork", "ddp_join_notebook", "fsdp_join", "model_parallel_join"}
    names |= {f"{name}_find_unused_parameters_{to}" for name in names if "ddp" in name for to in ("true", "false")}
    assert names <= {*STRATEGY_REGISTRY.available_strategies()}
    strategy = Fabric(accelerator="cpu", devices=2, strategy="ddp_join_find_unused_parameters_true").strategy
    assert isinstance(strategy, DDPJoinStrategy)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}


def test_strategies_of_the_trainer_and_of_fabric_are_told_apart() -> None:
    with pytest.raises(ValueError, match="for the Trainer of"):
        Fabric(accelerator="cpu", strategy=lightning_join.DDPJoinStrategy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lightning_join\.fabric\.DDPJoinStrategy, for Fabric"):
        pl.Trainer(accelerator="cpu", logger=False, strategy=DDPJoinStrategy())  # type: ignore[arg-type]


PROGRAM = """
import sys
import torch
from lightning.fabric import Fabric
import lightning_join

def train(fabric, fails=False):
    rank = fabric.global_rank
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    data = torch.utils.data.DataLoader(torch.ones((1, 3)[rank], 2), batch_size=1)
    for step, batch in enumerate(fabric.setup_dataloaders(data, use_distributed_sampler=False)):
        fabric.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        if fails and step == 1:
            raise ValueError("of the user's")
    return net.weight.tolist()

if __name__ == "__main__":
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1])
    if sys.argv[1] == "ddp_join":
        fabric.launch()
        print(train(fabric), flush=True)
        train(fabric, "fails" in sys.argv)
    else:
        print(fabric.launch(train, "fails" in sys.argv))
"""


def run_program(folder: Path, *arguments: str, program: str = PROGRAM) -> Any:
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_other_package(tmp_path: Path) -> None:
    program = PROGRAM.replace("lightning.fabric", "lightning_fabric").replace(
        "import lightning_join", "import pytorch_lightning_join"
    )
    ran = run_program(tmp_path, "ddp_join_spawn", program=program)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "strategy",
    ["ddp_join", *(pytest.param(name, marks=pytest.mark.long) for name in ("ddp_join_spawn", "ddp_join_fork"))],
)
def test_processes_that_fabric_starts(strategy: str, tmp_path: Path) -> None:
    trains = run_program(tmp_path, strategy, "fails")
    fails = trains
    if strategy != "ddp_join":  # which trains first, and fails in a second loop
        trains = run_program(tmp_path, strategy)
        assert trains.returncode == 0, trains.stderr
    torch.manual_seed(0)
    weight = torch.nn.Linear(2, 1).weight.detach() - 0.1 * (1 + 0.5 + 0.5)  # three steps, of one half in the tail
    found = list(map(json.loads, re.findall(r"\[\[.*?\]\]", trains.stdout)))  # two may be in one line
    assert found
    for each in found:
        torch.testing.assert_close(torch.tensor(each), weight)
    assert fails.returncode != 0
    assert "of the user's" in fails.stderr
    if strategy == "ddp_join":  # elsewhere whoever has started them ends all with the first that fails
        assert "PeerFailedError: Rank 1" in fails.stderr


def test_a_loop_without_a_process_group_names_the_launch() -> None:
    strategy = DDPJoinStrategy(parallel_devices=[torch.device("cpu")] * 2)
    with pytest.raises(JoinError, match=r"without a process group\. Call fabric\.launch\(\)"):
        list(strategy.batches([1]))
