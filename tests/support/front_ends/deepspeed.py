"""A `Run` by a DeepSpeed engine on CPUs, and a `Recipe`, of what only engines do."""

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

from tests.support import run
from tests.support.run import Batch, Run, weights_of
from torch_join import Join

# The engine computes in float32.
TOLERANCE = 2e-6
TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Recipe(Run):
    """A run by an engine, in float32.

    Attributes:
        front: What drives the engine.
        options: Of `zero_optimization`.
        config: What else there is in the engine's configuration.
        divides: How often a loss is divided by the window.
        scheduled_times: How often the scheduler is stepped after each step of the optimizer.
    """

    lengths: tuple[int, ...] = (2, 4)
    epochs: int = 2
    optimizer: str = "sgd"
    model: str = ""
    rest: str = "goes on"
    scheduler: str | None = "step"
    clip: float = 0.0
    seed: int = 100
    dtype: torch.dtype = torch.float32
    stage: int = 2
    front: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    divides: int = 1
    scheduled_times: int = 1

    @property
    def option(self) -> Any:
        return count_of if self.weighting == "count" else self.weighting

    def batches(self, rank: int, epoch: int = 0) -> list[Batch]:
        """The same in each epoch."""
        generator = torch.Generator().manual_seed(self.seed + rank)
        sizes = torch.randint(1, 5, (self.lengths[rank],), generator=generator).tolist()
        made = [(torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes]
        return [(x.to(self.dtype), y.to(self.dtype)) for x, y in made]

    def batch(self, rank: int, epoch: int, index: int) -> Batch:
        return self.batches(rank)[index]

    def weights(self, batches: dict[int, Batch], epoch: int) -> dict[int, float]:
        count = count_of if self.weighting == "count" else lambda batch: len(batch[0])
        return weights_of(self.weighting, self.world_size, {rank: count(batch) for rank, batch in batches.items()})

    def build(self) -> "Net":
        return Net(self.model).to(self.dtype)

    def make_optimizer(self, parameters: Any, kind: str = "", sharded: bool = False) -> torch.optim.Optimizer:
        trained = [p for p in parameters if p.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)

    def make_scheduler(self, optimizer: Any, times: int = 1, steps: float | None = None) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def scheduled(self, when: str, synced: bool, skipped: bool) -> int:
        return self.scheduled_times * super().scheduled(when, synced, skipped)

    def before_step(self, net: Any, epoch: int, step: int) -> None:
        net.step = step

    def losses(self, model: Any, batch: Batch, rank: int, epoch: int, step: int) -> Iterator[Tensor]:
        yield functional.mse_loss(model(batch[0]), batch[1]) / self.accumulate ** (self.divides - 1)

    def fill_gradients(self, net: Any) -> None:
        """Set zeros, as an engine does."""
        for parameter in net.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


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


def config_of(recipe: Recipe) -> dict[str, Any]:
    """Return an engine's configuration: small buckets, so that there are several."""
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": recipe.accumulate,
        "gradient_clipping": recipe.clip or 0.0,  # 1.0 if it is left out
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
    optimizer = recipe.make_optimizer(net.parameters())
    scheduler = recipe.make_scheduler(optimizer)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config_of(recipe))
    return engine, scheduler


def train(rank: int, recipe: Recipe, each: Callable[..., None] | None = None, **options: Any) -> Trained:
    """Train in a plain loop; `each` is called after each step."""
    with deepspeed_of(rank) as deepspeed:
        net: Any = recipe.build()
        engine, scheduler = engine_of(deepspeed, recipe, net)
        own = scheduler.optimizer  # of the user's, inside of ZeRO's: it holds this rank's shard
        with Join([engine, own, scheduler], weighting=recipe.option, timeout=TIMEOUT, **options) as join:
            for epoch in range(recipe.epochs):
                for net.step, batch in enumerate(join.batches(recipe.batches(rank, epoch))):
                    for loss in recipe.losses(engine, batch, rank, epoch, net.step):
                        engine.backward(loss)
                    engine.step()
                    if each is not None:
                        each(join, engine)
        return outcome(deepspeed, engine, net)


def expected_of(recipe: Recipe, ends_windows: bool = False, **changes: Any) -> dict[str, Tensor]:
    """Train in one process; `ends_windows` is whether the end of an epoch ends a window."""
    rest = "steps" if ends_windows else "goes on"
    expected = run.reference(recipe.but(dtype=torch.float64, rest=rest, **changes))
    return {name: p.detach() for name, p in expected.net.named_parameters()}


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


@dataclass(frozen=True)
class _Plain(Recipe):
    """A recipe that does a run on the run's own model and batches."""

    option = Run.option
    batch, batches, losses, weights = Run.batch, Run.batches, Run.losses, Run.weights
    build, make_optimizer, before_step = Run.build, Run.make_optimizer, Run.before_step

    def make_scheduler(self, optimizer: Any, times: int = 1, steps: float | None = None) -> Any:
        made = Run.make_scheduler(self, optimizer)
        return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0) if made is None else made


def parameters(rank: int, run: Run) -> list[Tensor]:
    """Do a run on one rank; return the parameters."""
    return [*train(rank, _Plain(**{**vars(run), "dtype": torch.float32})).parameters.values()]
