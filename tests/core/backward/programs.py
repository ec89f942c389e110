"""Programs whose backward has collectives, and what one process computes on the union of their batches."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.core.backward.synced import SyncNorm
from tests.emulator import place
from tests.support.inside import planned_rows
from torch_join import Join

ROWS = 3  # of each rank, in a contrastive loss


@dataclass(frozen=True)
class Program:
    """What is trained; every name in `options` is looked for below."""

    lengths: tuple[int, ...]
    weighting: str = "world"
    options: frozenset[str] = frozenset()
    epochs: int = 2
    wrapper: tuple[tuple[str, Any], ...] = ()  # arguments of DDP
    seed: int = field(default=0)

    @property
    def world_size(self) -> int:
        return len(self.lengths)

    @cached_property
    def rows(self) -> list[dict[int, tuple[int, int]]]:
        """By step and rank that trains: whose batch, and which of its."""
        if "rebalance" in self.options:
            return planned_rows(self.lengths, [None] * self.world_size if "stream" in self.options else None)
        lengths = [*enumerate(self.lengths)]
        return [{r: (r, step) for r, length in lengths if length > step} for step in range(max(self.lengths))]

    def active(self, step: int) -> list[int]:
        return [*self.rows[step]]

    def batch(self, rank: int, step: int, epoch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * rank + step + 77 * epoch + 9999 * self.seed)
        rows = ROWS + (rank + 2 * step) % 4
        make = partial(torch.randn, dtype=torch.float64, generator=generator)
        return make(rows, 8), make(rows, 4)

    def syncs(self, step: int) -> bool:
        return "accumulates" not in self.options or step % 2 == 1 or step + 1 == len(self.rows)


class Net(nn.Module):
    def __init__(self, program: Program, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        options = self.options = program.options
        norm = nn.Identity if "no norm" in options else partial(SyncNorm, group=group)
        self.first, self.norm1 = nn.Linear(8, 16, bias=False), norm(16)
        self.second, self.norm2 = nn.Linear(16, 16, bias=False), norm(16)
        self.last = nn.Linear(16, 4)
        self.extra = nn.Linear(4, 4) if "unused" in options else None
        if "frozen" in options:
            self.second.requires_grad_(False)
        self.double()

    def _block(self, x: Tensor) -> Tensor:
        return self.norm2(self.second(x)).relu()  # type: ignore[no-any-return]

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = self.norm1(self.first(x)).relu()
        x = checkpoint(self._block, x, use_reentrant=False) if "checkpoint" in self.options else self._block(x)
        x = self.last(x)
        return x if self.extra is None or step % 2 == 0 else self.extra(x)


def optimizer_of(program: Program, net: nn.Module) -> torch.optim.Optimizer:
    if "adam" in program.options:
        return torch.optim.Adam(net.parameters(), 1e-2)
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def second_of(program: Program) -> Net | None:
    """Return another model, if the program has one."""
    net = Net(program) if {"summed", "chained"} & program.options else None
    for parameter in net.parameters() if net is not None else ():
        parameter.data.mul_(0.7)
    return net


def outputs_of(program: Program, first: Any, second: Any, x: Tensor, step: int) -> Tensor:
    out = first(x, step)
    if "summed" in program.options:
        out = out + second(x, step)
    if "chained" in program.options:
        out = second(torch.cat([out, out], 1), step)
    return out  # type: ignore[no-any-return]


def penalty_of(program: Program, out: Tensor, x: Tensor) -> Tensor:
    if "penalty" not in program.options:
        return torch.zeros((), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return gradient.square().mean()


def contrast(mine: Tensor, everyone: Tensor, first: int) -> Tensor:
    targets = torch.arange(first, first + len(mine))
    return nn.functional.cross_entropy(mine @ everyone.t() / 4, targets)


def reference(program: Program) -> Net:
    """Train in one process: with batch norms over the union, and the ranks' weighted losses added up."""
    net, second, options = Net(program), second_of(program), program.options
    optimizer = optimizer_of(program, nn.ModuleList([net, second] if second is not None else [net]))
    for epoch in range(program.epochs):
        cleared = True
        for step, row in enumerate(program.rows):
            active = program.active(step)
            batches = {rank: program.batch(*row[rank], epoch) for rank in active}
            sizes = {rank: len(batches[rank][0]) for rank in active}
            inputs = {rank: batches[rank][0].requires_grad_("penalty" in options) for rank in active}
            if cleared:
                optimizer.zero_grad()
            if "evaluates" in options:
                net.eval()
                net(torch.cat([batches[rank][0] for rank in active]))
                net.train()
            teams = [[r for r in active if r < 2], [r for r in active if r >= 2]] if "subgroup" in options else [active]
            outputs: dict[int, Tensor] = {}
            for team in filter(None, teams):
                joint = outputs_of(program, net, second, torch.cat([inputs[rank] for rank in team]), step)
                outputs.update(zip(team, joint.split([sizes[rank] for rank in team]), strict=True))
            total = torch.zeros((), dtype=torch.float64)
            for position, rank in enumerate(active):
                loss = (outputs[rank] - batches[rank][1]).square().mean()
                loss = loss + penalty_of(program, outputs[rank], inputs[rank])
                if "contrast" in options:
                    everyone = torch.cat([outputs[other][:ROWS] for other in active])
                    loss = loss + contrast(outputs[rank][:ROWS], everyone, position * ROWS)
                if "mean" in options:
                    loss = loss + (sum(outputs[r].mean(0) for r in active) / len(active)).square().sum()  # type: ignore[union-attr]
                shares = {"world": 1 / program.world_size, "active": 1 / len(active)}
                total = total + loss * shares.get(program.weighting, sizes[rank] / sum(sizes.values()))
            total.backward()
            if cleared := program.syncs(step):
                optimizer.step()
    return net


def wrapped(net: Net, program: Program) -> Any:
    """Have DDP, or FSDP of one generation, average the gradients."""
    if "fsdp2" in program.options:
        for layer in (net.first, net.second):
            fully_shard(layer)
        return fully_shard(net)
    if "fsdp1" in program.options:
        return FullyShardedDataParallel(net, device_id=place(), use_orig_params=True)
    return DistributedDataParallel(net, **{"bucket_cap_mb": 0.0005, **dict(program.wrapper)})


def whole_parameters(net: nn.Module, model: nn.Module) -> list[Tensor]:
    """Gather a model's parameters; all ranks call this."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().clone() for p in net.parameters()]
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in net.parameters()]


def train(rank: int, program: Program) -> list[Tensor]:
    """Train this rank's share; return parameters and buffers."""
    options = program.options
    group = dist.new_group(range(program.world_size)) if "group" in options else None
    if "subgroup" in options:
        groups = [dist.new_group([0, 1]), dist.new_group(list(range(2, program.world_size)))]
        group = groups[rank >= 2]
    net = Net(program, group)
    ddp = wrapped(torch.compile(net, backend="aot_eager") if "compiled" in options else net, program)
    other = None if (second := second_of(program)) is None else wrapped(second, program)
    models = [model for model in (ddp, other) if model is not None]
    optimizer = optimizer_of(program, nn.ModuleList(models))
    scaler = torch.amp.GradScaler(place().type, init_scale=2.0**10) if "scaler" in options else None  # type: ignore[attr-defined]
    if "hook" in options:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    if "fp16 hook" in options:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    given = [*models, optimizer, *([] if scaler is None else [scaler])]
    switches = {name: name in options for name in ("may_break", "rebalance")}
    with Join(given, weighting=program.weighting, **switches) as join:  # type: ignore[arg-type]
        join.backward_collectives = "subgroup" in options and "no switch" not in options
        for epoch in range(program.epochs):
            batches = [program.batch(rank, step, epoch) for step in range(program.lengths[rank])]
            cleared = True
            for x, y in join.batches(iter(batches) if "stream" in options else batches):
                step, active = join.step, list(join.active_ranks)
                if cleared:
                    optimizer.zero_grad()
                if "evaluates" in options:
                    net.eval()
                    with torch.no_grad():
                        ddp(x)
                    net.train()
                cleared = program.syncs(step)
                with nullcontext() if cleared else ddp.no_sync():
                    x.requires_grad_("penalty" in options)
                    output = outputs_of(program, ddp, other, x, step)
                    loss = (output - y).square().mean() + penalty_of(program, output, x)
                    if "contrast" in options:
                        if "functional" in options:
                            every = all_gather_tensor_autograd(output[:ROWS].contiguous(), 0, dist.group.WORLD)
                            everyone = torch.cat([every[r * ROWS : (r + 1) * ROWS] for r in active])
                        elif "ours" in options:
                            everyone = join.all_gather(output[:ROWS], sync_grads=True).flatten(0, 1)
                        else:
                            parts = dnn.all_gather(output[:ROWS])  # type: ignore[no-untyped-call]
                            everyone = torch.cat([parts[r] for r in active])
                        loss = loss + contrast(output[:ROWS], everyone, active.index(rank) * ROWS)
                    if "mean" in options:
                        mean = dnn.all_reduce(output.mean(0)) / len(active)  # type: ignore[no-untyped-call]
                        loss = loss + mean.square().sum()
                    (loss if scaler is None else scaler.scale(loss)).backward()
                if cleared and scaler is not None:
                    scaler.step(optimizer)
                    scaler.update()
                elif cleared:
                    optimizer.step()
    return [*whole_parameters(net, ddp), *(b.detach().clone() for b in net.buffers())]
