"""A model whose experts live on several ranks, and what one process makes of the same batches."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

WIDTH, TOKENS, EXPERTS, CLASSES = 4, 3, 4, 3
Batch = tuple[Tensor, Tensor]


def masked(batch: Batch) -> Batch:
    return torch.zeros_like(batch[0]), torch.full_like(batch[1], -100)


@dataclass(frozen=True)
class Case:
    """A training over several ranks.

    Attributes:
        lengths: By rank, how many batches it has.
        wrap: `"ddp"`, which ignores the experts, or `"fsdp"`, which shards the rest.
        ranks_per_model: How many ranks share one set of experts.
        weighting: As in `Join`.
        placeholder: Likewise.
        balance: Whether the loss has a term of what each expert is given: `"local"` by the rank's own batch,
            `"global"` by those of all ranks; or `""`.
        bias: Whether experts that all ranks have given little are chosen more easily from the next step on.
        window: Over how many steps gradients are accumulated.
        clips: Whether gradients are clipped by their norm over all ranks.
        manual: Whether Lightning's optimization is manual.
        callback: Whether a `JoinCallback` makes Lightning's plain strategy join.
    """

    lengths: tuple[int, ...]
    wrap: str = "ddp"
    ranks_per_model: int = 2
    weighting: str = "world"
    placeholder: Any = "last"
    balance: str = "local"
    bias: bool = False
    window: int = 1
    clips: bool = False
    manual: bool = False
    callback: bool = False

    def batch(self, rank: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * rank + step)
        count = 1 + (rank + 2 * step) % 3
        x = torch.randn(count, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
        return x, torch.randint(CLASSES, (count, TOKENS), generator=generator)

    def batches(self, rank: int) -> list[Batch]:
        return [self.batch(rank, step) for step in range(self.lengths[rank])]

    def rows(self) -> list[list[int]]:
        """Return by step how many each active rank has."""
        steps = range(max(self.lengths))
        return [[len(self.batch(rank, s)[0]) for rank, n in enumerate(self.lengths) if s < n] for s in steps]

    def ends_window(self, step: int) -> bool:
        return (step + 1) % self.window == 0 or step + 1 == max(self.lengths)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that are to have them, as many as each has for each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: list[int], of: list[int], group: Any) -> Tensor:
        ctx.way_back = of, out, group
        received = rows.new_empty(sum(out), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), out, of, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Exchange.apply(gradient, *ctx.way_back), None, None, None  # type: ignore[no-untyped-call]


class Experts(nn.Module):
    """A layer of experts, each token's best two of them; none is dropped. Without a group all are here."""

    bias: Tensor
    everyones: Tensor | None = None  # what each expert is given by all ranks, where one process knows it

    def __init__(self, group: Any, case: Case) -> None:
        super().__init__()
        self.group, self.count, self.case = group, 1 if group is None else group.size(), case
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.empty(EXPERTS // self.count, WIDTH, WIDTH))
        self.balance: Any = 0.0
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.given = torch.zeros(EXPERTS, dtype=torch.float64)  # in this window's steps

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        chosen = (scores + self.bias).topk(2, dim=-1).indices
        gates = scores.gather(1, chosen)
        expert, token = chosen.flatten(), torch.arange(len(tokens)).repeat_interleave(2)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        if self.training:
            self.given = self.given + counts
        shares = counts.double()
        if self.case.balance == "global":
            if self.group is not None:
                dist.all_reduce(shares)
            elif self.everyones is not None:
                shares = self.everyones
        self.balance = (shares / shares.sum().clamp(min=1) * scores.mean(0)).sum()
        sent = tokens[token[order]]
        if self.group is None:
            done = self._run(sent, counts)
        else:
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts, group=self.group)
            theirs = theirs.view(self.count, -1)
            of, out = counts.view(self.count, -1).sum(1).tolist(), theirs.sum(1).tolist()
            received = _Exchange.apply(sent, out, of, self.group)  # type: ignore[no-untyped-call]
            by = (
                torch.arange(theirs.shape[1])
                .repeat(self.count)
                .repeat_interleave(theirs.flatten())
                .argsort(stable=True)
            )
            ran = self._run(received[by], theirs.sum(0))
            done = _Exchange.apply(torch.empty_like(ran).index_copy(0, by, ran), of, out, self.group)  # type: ignore[no-untyped-call]
        weighed = done * gates.flatten()[order][:, None]
        return x + torch.zeros_like(tokens).index_add(0, token[order], weighed).view_as(x)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        return torch.cat(
            [torch.tanh(part @ w) for part, w in zip(rows.split(counts.tolist()), self.weight, strict=True)]
        )


class Net(nn.Module):
    def __init__(self, case: Case, group: Any = None) -> None:
        super().__init__()
        self.first, self.experts, self.head = nn.Linear(WIDTH, WIDTH), Experts(group, case), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.experts(torch.tanh(self.first(x))))
        return out


def make(case: Case, group: Any = None, place: int = 0) -> Net:
    net, generator = Net(case, group).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            rows = EXPERTS if p.ndim == 3 else len(p)
            whole = torch.randn(rows, *p.shape[1:], generator=generator, dtype=torch.float64) / 2
            p.copy_(whole[place * len(p) : (place + 1) * len(p)] if p.ndim == 3 else whole)
    return net


def loss_of(case: Case, out: Tensor, y: Tensor, net: Net) -> Tensor:
    # Of no rows at all the mean is NaN, and its gradient zero.
    return cross_entropy(out.flatten(0, 1), y.flatten()) + (net.experts.balance if case.balance else 0.0)


def make_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def alone(case: Case) -> Net:
    """Return what one process trains on the batches of all ranks."""
    net = make(case)
    optimizer, world = make_optimizer(net.parameters()), len(case.lengths)
    for step in range(max(case.lengths)):
        batches = [case.batch(rank, step) for rank, length in enumerate(case.lengths) if step < length]
        rows = sum(len(x) for x, _ in batches)
        before = net.experts.given
        with torch.no_grad():
            for x, _ in batches:
                net(x)
        net.experts.everyones, net.experts.given = net.experts.given - before, before
        for x, y in batches:
            weights = {"world": 1 / world, "active": 1 / len(batches), "samples": len(x) / rows}
            (loss_of(case, net(x), y, net) * weights[case.weighting] / case.window).backward()
        if case.ends_window(step):
            rebias(net, net.experts.given)
            if case.clips:
                nn.utils.clip_grad_norm_(net.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
    return net


def rebias(net: Net, given: Tensor) -> None:
    if net.experts.case.bias:
        net.experts.bias.add_(0.05 * torch.sign(given.mean() - given))
    net.experts.given = torch.zeros_like(given)


class Part:
    """This rank's part of the model."""

    def __init__(self, case: Case) -> None:
        world, shared = len(case.lengths), case.ranks_per_model
        mesh = init_device_mesh("cpu", (world // shared, shared), mesh_dim_names=("copies", "experts"))
        self.case, self.world, self.copies = case, world, mesh["copies"].get_group()
        self.experts_group, self.place = mesh["experts"].get_group(), mesh["experts"].get_local_rank()
        self.net = make(case, self.experts_group, self.place)
        self.own = self.net.experts.weight

    def hide(self, module: nn.Module, name: str = "") -> None:
        """Have DDP of `module`, in which the net has this name, ignore the experts."""
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [f"{name}experts.weight"])

    def shard(self) -> None:
        fully_shard(self.net, mesh=init_device_mesh("cpu", (self.world,)), ignored_params={self.own})

    def before_step(self) -> None:
        """Do what comes between a window's last backward and the optimizer's step."""
        assert self.own.grad is not None
        dist.all_reduce(self.own.grad, group=self.copies)
        self.own.grad /= self.world  # as gradients of the rest are averaged
        given = self.net.experts.given.clone()
        if self.case.bias:
            dist.all_reduce(given)
        rebias(self.net, given)
        if self.case.clips:
            self.clip()

    def clip(self) -> None:
        assert self.own.grad is not None
        grads = [p.grad for p in self.net.parameters() if p is not self.own and p.grad is not None]
        local: list[Tensor] = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        rest, experts = torch.stack([(each**2).sum() for each in local]).sum(), (self.own.grad**2).sum()
        dist.all_reduce(experts, group=self.experts_group)
        if self.case.wrap == "fsdp":
            dist.all_reduce(rest)
        scale = (0.2 / ((rest + experts).sqrt() + 1e-6)).clamp(max=1)
        for each in (*local, self.own.grad):
            each.mul_(scale)

    @property
    def parameters(self) -> list[Tensor]:
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.net.parameters()]
        return [each.detach().clone() for each in whole]


class Spread(Part):
    """With what trains it in a loop of one's own."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model: Any = self.net
        if case.wrap == "ddp":
            self.hide(self.net)
            self.model = DistributedDataParallel(self.net)
        else:
            self.shard()
        self.optimizer = make_optimizer(self.net.parameters())

    def run(self, batches: Iterable[Batch], each: Callable[[], None] = lambda: None) -> None:
        """Train on what is given, one step for each."""
        case = self.case
        for step, (x, y) in enumerate(batches):
            syncs = case.ends_window(step)
            if case.wrap == "fsdp":
                self.model.set_requires_gradient_sync(syncs)
            with self.model.no_sync() if case.wrap == "ddp" and not syncs else nullcontext():
                (loss_of(case, self.model(x), y, self.net) / case.window).backward()
            if syncs:
                self.before_step()
                self.optimizer.step()
                self.optimizer.zero_grad()
            each()


def check(case: Case, ranks: Sequence[tuple[int, list[Tensor]]]) -> None:
    """Compare what each rank has with what one process has; each says which of the experts it holds."""
    expected = [p.detach() for p in alone(case).parameters()]
    for place, parameters in ranks:
        for mine, whole in zip(parameters, expected, strict=True):
            part = whole[place * len(mine) : (place + 1) * len(mine)] if whole.ndim == 3 else whole
            assert (mine - part).abs().max() <= 1e-9
