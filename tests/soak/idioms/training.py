"""How a drawn program trains on a batch: its losses, its steps, and what it does besides."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.soak.idioms.losses import LOSSES
from tests.soak.idioms.models import MODELS, OPTIMIZERS, SCHEDULES, UNUSED, Average, Lookahead, Progress
from tests.soak.idioms.worlds import AVG, MAX, OUTPUTS, Joined

DDP: dict[str, dict[str, Any]] = {
    "usual": {},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
    "small views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 2e-4},
    "finds unused": {"find_unused_parameters": True},
    "own buffers": {"broadcast_buffers": False},
    "average hook": {"hook": "average"},
    "halving hook": {"hook": "halved"},
}


class Training:
    """A model, its optimizers, and what else a program changes."""

    def __init__(self, world: Joined, program: Any) -> None:
        self.world, self.program = world, program
        self.extras = program.extras
        self.join: Any = None
        torch.manual_seed(program.seed)
        self.net = MODELS[program.model]()
        options = dict(DDP[program.ddp])
        if program.model in UNUSED:
            options = {**options, "find_unused_parameters": True, "static_graph": False}
        if "tau" in self.extras:
            self.net.register_buffer("tau", torch.zeros(()))
        if "center" in self.extras:
            self.net.register_buffer("center", torch.zeros(OUTPUTS))
        if "teacher" in self.extras:
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.model = world.ddp(self.net, **options)
        self.parameters = [*self.net.parameters()]
        two = program.step in ("adversaries", "two models")
        self.other = world.ddp(nn.Sequential(nn.Linear(OUTPUTS, 4), nn.Tanh(), nn.Linear(4, 1))) if two else None
        self._make_optimizers()
        self.progress = Progress()
        self.kept: dict[str, Any] = {}  # given, by the name under which it is compared
        self._make_extras()
        self.previous: Any = None
        self.saved: Any = None

    def _make_optimizers(self) -> None:
        make = OPTIMIZERS[self.program.optimizer]
        if self.program.split == "groups":
            parts: list[Any] = [[{"params": self.parameters[::2]}, {"params": self.parameters[1::2], "lr": 0.01}]]
        elif self.program.split == "two":
            parts = [self.parameters[::2], self.parameters[1::2]]
        else:
            parts = [self.parameters]
        if self.other is not None:
            parts.append([*self.other.parameters()])
        self.plain = [make(part) for part in parts]
        self.optimizers: list[Any] = [Lookahead(o) if "lookahead" in self.extras else o for o in self.plain]
        schedule = SCHEDULES.get(self.program.schedule)
        self.schedulers = [schedule(o) for o in self.plain] if schedule else []

    def _make_extras(self) -> None:
        extras, net = self.extras, self.net
        if "average" in extras:
            self.kept["average"] = Average(net)
        if "torch average" in extras:
            by = torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
            self.kept["torch average"] = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=by)
        if "teacher" in extras:
            self.kept["teacher"] = self.teacher
        if "scaler" in extras:
            self.kept["scaler"] = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        # An average that is not given, on all ranks or on one.
        shadows = "forgotten average" in extras or ("average of rank 0" in extras and self.world.rank == 0)
        self.shadow = copy.deepcopy(net).requires_grad_(False) if shadows else None
        if "hooked gradients" in extras:
            for p in self.parameters:
                if p.requires_grad and not p.is_complex():
                    p.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
        if "clipping hook" in extras:
            for o in self.plain:
                o.register_step_pre_hook(lambda o, *_: self.clip_gradients(0.3))
        net.calls = 0
        if "counted forwards" in extras:
            net.register_forward_pre_hook(lambda *_: setattr(net, "calls", net.calls + 1))

    @property
    def given(self) -> list[Any]:
        models = [model for model in (self.model, self.other) if model is not None]
        schedulers = [] if "schedule by epoch" in self.extras else self.schedulers
        return [*models, *self.optimizers, *schedulers, self.progress, *self.kept.values()]

    def keep(self, name: str) -> None:
        """Keep all that there is, to compare it."""
        for kind in ("net", "other", "plain", "schedulers", "progress", "kept"):
            self.world.keep(f"{name} {kind}", getattr(self, kind))
        if self.shadow is not None:
            self.world.keep(f"{name} shadow", self.shadow)
        if "counted forwards" in self.extras:
            self.world.keep(f"{name} calls", self.net.calls)
        if "attribute that appears" in self.extras:
            self.world.keep(f"{name} scale", getattr(self.net, "scale", 1.0))

    # ------------------------------------------------------------ the pieces of a step

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if "tau" in self.extras:
            self.net.tau += 1
        found = LOSSES[self.program.loss](self, x, y)
        if "teacher" in self.extras:
            with torch.no_grad():
                target = self.teacher(x)
            found = found + 0.1 * functional.mse_loss(self.model(x), target)
        if "tau" in self.extras:
            found = found / (1 + 0.1 * self.net.tau.clone())
        if "center" in self.extras:  # which the model keeps alike itself, as DINO does
            self.net.center.lerp_(self.world.all_reduce(y.mean(0), AVG), 0.3)
            found = found * (1 + 0.1 * torch.tanh(self.net.center.clone().sum()))
        found = found / (1 + 0.05 * self.net.calls) / getattr(self.net, "scale", 1.0)
        if "scaler" in self.extras:
            return self.kept["scaler"].scale(found)  # type: ignore[no-any-return]
        return found

    def backward(self, x: Tensor, y: Tensor, share: float = 1.0, synced: bool = True) -> Tensor:
        with nullcontext() if synced else self.model.no_sync():
            loss = self.loss(x, y) * share
            loss.backward()
        return loss.detach()

    def clear(self) -> None:
        how = self.program.clear
        if how == "model":
            self.model.zero_grad()
        elif how == "by hand":
            for p in self.parameters:
                p.grad = None
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=how != "to zeros")

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def clip_gradients(self, most: float) -> None:
        if self.gradients:
            nn.utils.clip_grad_norm_([p for p in self.parameters if p.grad is not None], most)

    def change_gradients(self) -> None:
        for change in self.program.changes:
            CHANGES[change](self)

    def update(self, *which: int) -> None:
        """Step the optimizers, or those of these numbers, and everything that follows a step."""
        scaler = self.kept.get("scaler")
        optimizers = [self.optimizers[i] for i in which] if which else self.optimizers
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        self.change_gradients()
        skipped = "skipped steps" in self.extras and self.progress.steps % 4 == 2
        for optimizer in optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            elif not skipped:
                optimizer.step()
        if scaler is not None:
            scaler.update()
        self.progress.steps += 1
        self.follow()

    def follow(self) -> None:
        """Do what comes after the optimizers' step."""
        steps, net = self.progress.steps, self.net
        for name in ("average", "torch average"):
            if name in self.kept:
                (self.kept[name].update if name == "average" else self.kept[name].update_parameters)(net)
        for average in (self.kept.get("teacher"), self.shadow):
            if average is not None:
                with torch.no_grad():
                    for mine, p in zip(average.parameters(), self.parameters, strict=True):
                        mine.lerp_(p, 0.2)
        if "schedule by epoch" not in self.extras:
            for scheduler in self.schedulers:
                scheduler.step(*([1 + 0.01 * steps] if self.program.schedule == "plateau" else []))
        for extra in self.extras:
            if extra in AFTER:
                AFTER[extra](self, steps)

    # ------------------------------------------------------------ what is done with other ranks besides

    def communicate(self, loss: Tensor) -> None:
        world, join = self.world, self.join
        for kind in self.program.collectives:
            if kind == "sum":
                self._count(world.all_reduce(loss.clone()))
            elif kind == "largest":
                self._count(world.all_reduce(loss.clone(), MAX))
            elif kind == "objects":
                self._count(torch.tensor(sum(world.objects(float(loss)))))
            elif kind == "broadcast":
                number = loss.clone()
                torch.distributed.broadcast(number, src=join.active_ranks[0])
                self._count(number)
            elif kind == "barrier":
                torch.distributed.barrier()
            elif kind == "rate":  # what all ranks have found decides the training
                mean = world.all_reduce(loss.clone(), AVG)
                for optimizer in self.plain:
                    for group in optimizer.param_groups:
                        group["lr"] = group["lr"] * (0.9 if mean > 1 else 1.05)

    def _count(self, number: Tensor) -> None:
        """Let what was reduced change the training."""
        with torch.no_grad():
            self.parameters[-1].mul_(1 + 0.01 * torch.tanh(number))


def _clip_each(training: Training) -> None:
    for p in training.parameters:
        if p.grad is not None:
            nn.utils.clip_grad_norm_([p], 0.1, norm_type=1.0)


def _add_noise(training: Training) -> None:
    generator = torch.Generator().manual_seed(training.progress.steps)
    for gradient in training.gradients:
        gradient += 0.01 * torch.randn(gradient.shape, generator=generator)


def _center(training: Training) -> None:
    for gradient in training.gradients:
        if gradient.dim() > 1:
            gradient -= gradient.mean(dim=tuple(range(1, gradient.dim())), keepdim=True)


def _clip_by_weight(training: Training) -> None:
    for p in training.parameters:
        if p.grad is not None:
            p.grad.mul_((0.1 * p.detach().norm().clamp(min=1e-3) / (p.grad.norm() + 1e-6)).clamp(max=1.0))


def _drop_last(training: Training) -> None:
    if training.progress.steps % 3 == 1:
        training.parameters[-1].grad = None


CHANGES: dict[str, Callable[[Training], None]] = {
    "clip": lambda training: training.clip_gradients(0.2),
    "clip values": lambda training: nn.utils.clip_grad_value_(training.parameters, 0.05),
    "clip each": _clip_each,
    "clip by weight": _clip_by_weight,
    "noise": _add_noise,
    "center": _center,
    "mask": lambda training: [gradient[..., :1].zero_() for gradient in training.gradients if gradient.dim()],  # type: ignore[func-returns-value]
    "drop": _drop_last,
}


def _roll_back(training: Training, steps: int) -> None:
    if steps == 1:
        training.previous = copy.deepcopy((training.net.state_dict(), [o.state_dict() for o in training.plain]))
    elif steps % 4 == 0 and training.previous is not None:
        training.net.load_state_dict(training.previous[0])
        for optimizer, state in zip(training.plain, training.previous[1], strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))


def _clamp(training: Training, steps: int) -> None:
    with torch.no_grad():
        for p in training.parameters:
            if not p.is_complex():
                p.clamp_(-0.6, 0.6)


def _set_rates(training: Training, steps: int) -> None:
    for optimizer in training.plain:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + steps)
            if "weight_decay" in group:
                group["weight_decay"] = 0.001 * steps


def _forget(training: Training, steps: int) -> None:
    if steps == 3:
        for optimizer in training.plain:
            getattr(optimizer, "optim", optimizer).state.clear()  # of a ZeroRedundancyOptimizer this rank's shard


def _scale_data(training: Training, steps: int) -> None:
    if steps == 2:
        for p in training.parameters:
            p.data = p.data * 0.9


def _freeze(training: Training, steps: int) -> None:
    training.parameters[0].requires_grad_(steps % 4 not in (1, 2))


def _appear(training: Training, steps: int) -> None:
    if steps == 4:
        training.net.scale = 1.5


AFTER: dict[str, Callable[[Training, int], None]] = {
    "rolls back": _roll_back,
    "clamped": _clamp,
    "sets rates": _set_rates,
    "forgets state": _forget,
    "new data": _scale_data,
    "freezes": _freeze,
    "attribute that appears": _appear,
}
