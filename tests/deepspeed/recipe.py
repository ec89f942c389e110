"""Trainings by a DeepSpeed engine on CPUs, and the same in one process by torch's optimizer, in float64."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_join import Join

# The engine computes in float32.
TOLERANCE = 2e-6
TIMEOUT = timedelta(seconds=30)
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Recipe:
    """A training.

    Attributes:
        lengths: By rank, its number of batches in an epoch.
        front: What drives the engine.
        window: Over how many micro-batches gradients are accumulated.
        clip: The largest norm of gradients; 0 for none.
        options: Of `zero_optimization`.
        config: What else there is in the engine's configuration.
    """

    lengths: tuple[int, ...] = (2, 4)
    stage: int = 2
    front: str = "plain"
    weighting: str = "world"
    window: int = 1
    clip: float = 0.0
    optimizer: str = "sgd"
    kind: str = ""
    epochs: int = 2
    seed: int = 100
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def option(self) -> Any:
        """What `weighting` is for what is tested."""
        return count_of if self.weighting == "count" else self.weighting


class Net(nn.Module):
    """A few layers.

    Args:
        kind: "tied", "frozen", "external" (a parameter is used outside of its module), "path" (another one at each
            third step), or a kind of checkpointing, "reentrant" or "not reentrant"; else none of these.
    """

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.kind, self.step = kind, 0
        self.a, self.b, self.c, self.d = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.unused = nn.Linear(3, 3)
        if kind == "tied":
            self.c.weight = self.b.weight
        if kind == "frozen":
            self.b.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.kind.endswith("reentrant"):
            for layer in (self.b, self.c):
                use = not self.kind.startswith("not")
                x = torch.utils.checkpoint.checkpoint(  # type: ignore[attr-defined]
                    lambda v, layer=layer: torch.tanh(layer(v)), x, use_reentrant=use
                )
        elif self.kind == "external":
            x = torch.tanh(functional.linear(torch.tanh(self.b(x)), self.c.weight, self.c.bias))
        elif self.kind == "path":
            x = torch.tanh((self.b if self.step % 3 else self.c)(x))
        else:
            x = torch.tanh(self.c(torch.tanh(self.b(x))))
        return self.d(x)  # type: ignore[no-any-return]


def count_of(batch: Batch) -> float:
    """Return what a batch counts where the weighting is "count": 0 for some."""
    return float(len(batch[0]) % 3)


def batches_of(recipe: Recipe, rank: int) -> list[Batch]:
    """Return a rank's own."""
    generator = torch.Generator().manual_seed(recipe.seed + rank)
    sizes = torch.randint(1, 5, (recipe.lengths[rank],), generator=generator).tolist()
    return [(torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes]


def optimizer_of(recipe: Recipe, parameters: Any) -> torch.optim.Optimizer:
    trained = [p for p in parameters if p.requires_grad]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


def scheduler_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def config_of(recipe: Recipe) -> dict[str, Any]:
    """Return an engine's configuration: small buckets, so that there are several."""
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": recipe.window,
        "gradient_clipping": recipe.clip,  # 1.0 if it is left out
        "zero_optimization": {
            "stage": recipe.stage,
            "overlap_comm": False,
            "reduce_bucket_size": 70,
            "stage3_param_persistence_threshold": 9,
            "stage3_prefetch_bucket_size": 50,
            "stage3_max_live_parameters": 120,
            "stage3_max_reuse_distance": 30,
            "stage3_gather_16bit_weights_on_model_save": True,
            **recipe.options,
        },
        **recipe.config,
    }


@contextmanager
def deepspeed_of(rank: int) -> Iterator[Any]:
    """Yield DeepSpeed, as it is before it has seen any process group."""
    before = dict(os.environ)
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), WORLD_SIZE=str(torch.distributed.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        from deepspeed.comm import comm
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.partition_parameters import Init
        from deepspeed.utils import groups

        # Its compiled all-reduce, of shared memory, goes past `torch.distributed`; a killed run leaves a lock behind.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.utils.logging.logger.setLevel("ERROR")
        kept = {name: value for name, value in vars(groups).items() if not callable(value)}
        comm.cdb = None
        # What a process has made before, other ranks may have not. Stage 3 counts it, compares the numbers over ranks,
        # and has another `linear` from then on, in whose backward gradients come in another order.
        numbered = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0]
        Init.param_id, numbered[0], linear = 0, 0, functional.linear
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        try:
            yield deepspeed
        finally:
            functional.linear = linear
            vars(groups).update(kept)
            comm.cdb = None
            os.environ.clear()
            os.environ.update(before)


@dataclass
class Trained:
    """What a rank has in the end: whole parameters, and the engine's counters with the learning rate."""

    parameters: dict[str, Tensor]
    counters: tuple[Any, ...]


def outcome(deepspeed: Any, engine: Any, net: nn.Module) -> Trained:
    """Return it; all ranks call this."""
    parameters = dict(net.named_parameters())
    is_sharded = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters([*parameters.values()], enabled=is_sharded):
        found = {name: p.detach().clone() for name, p in parameters.items()}
    return Trained(found, (engine.micro_steps, engine.global_steps, engine.skipped_steps, engine.get_lr()))


def engine_of(deepspeed: Any, recipe: Recipe, net: nn.Module) -> tuple[Any, Any]:
    """Return an engine, and its scheduler."""
    optimizer = optimizer_of(recipe, net.parameters())
    scheduler = scheduler_of(optimizer)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config_of(recipe))
    return engine, scheduler


def train(rank: int, recipe: Recipe, each: Callable[..., None] | None = None, **options: Any) -> Trained:
    """Train in a plain loop; `each` is called after each step."""
    with deepspeed_of(rank) as deepspeed:
        net = Net(recipe.kind)
        engine, scheduler = engine_of(deepspeed, recipe, net)
        own = scheduler.optimizer  # of the user's, inside of ZeRO's: it holds this rank's shard
        with Join([engine, own, scheduler], weighting=recipe.option, timeout=TIMEOUT, **options) as join:
            for _ in range(recipe.epochs):
                for net.step, (x, y) in enumerate(join.batches(batches_of(recipe, rank))):
                    engine.backward(functional.mse_loss(engine(x), y))
                    engine.step()
                    if each is not None:
                        each(join, engine)
        return outcome(deepspeed, engine, net)


def shares(recipe: Recipe, batches: list[Batch], world_size: int) -> list[float]:
    """Return how much the mean of each rank's batch counts in a step."""
    counts = {
        "world": [1.0 for _ in batches],
        "active": [1.0 for _ in batches],
        "samples": [float(len(x)) for x, _ in batches],
        "count": list(map(count_of, batches)),
    }[recipe.weighting]
    total = world_size if recipe.weighting == "world" else sum(counts)
    return [count / total if total else 0.0 for count in counts]


def reference(
    recipe: Recipe, divides: int = 1, scheduled: int = 1, ends_windows: bool = False, epochs: int = 0
) -> dict[str, Tensor]:
    """Train in one process.

    Args:
        recipe: The training.
        divides: How often a loss is divided by the window.
        scheduled: How often the scheduler is stepped after each step of the optimizer.
        ends_windows: Whether the end of an epoch ends a window.
        epochs: How many there are.
    """
    net = Net(recipe.kind).double()
    optimizer = optimizer_of(recipe, net.parameters())
    scheduler = scheduler_of(optimizer)
    everyone = [batches_of(recipe, rank) for rank in range(len(recipe.lengths))]
    micro = 0
    for _ in range(epochs or recipe.epochs):
        for net.step in range(max(recipe.lengths)):
            batches = [each[net.step] for each in everyone if net.step < len(each)]
            for (x, y), share in zip(batches, shares(recipe, batches, len(everyone)), strict=True):
                loss = functional.mse_loss(net(x.double()), y.double())
                (loss * share / recipe.window**divides).backward()
            micro += 1
            if micro % recipe.window == 0 or (ends_windows and net.step + 1 == max(recipe.lengths)):
                for parameter in net.parameters():  # as an engine does
                    if parameter.grad is None and parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
                if recipe.clip:
                    nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
                optimizer.step()
                optimizer.zero_grad()
                for _ in range(scheduled):
                    scheduler.step()
                micro = 0
    return {name: p.detach() for name, p in net.named_parameters()}


def check(found: list[Trained], expected: dict[str, Tensor]) -> float:
    """Check that all ranks have the same bits, and nearly what is expected; return the largest difference."""
    first = found[0]
    for rank, other in enumerate(found):
        assert other.counters == first.counters, f"rank {rank}: {other.counters}, rank 0: {first.counters}"
        for name, parameter in first.parameters.items():
            assert torch.equal(parameter, other.parameters[name]), f"{name} differs on rank {rank}"
    differences = {
        name: (first.parameters[name].double() - parameter).abs().max().item() for name, parameter in expected.items()
    }
    largest = max(differences.values())
    assert largest <= TOLERANCE, differences
    return largest
