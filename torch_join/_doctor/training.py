"""One uneven epoch, compared with a single process; and the cost of an even step."""

import copy
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_join._doctor.check import Check, Finding, Job
from torch_join._doctor.connections import TIMEOUT
from torch_join.join import Join

_SEED = 7
_BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}  # float32 for devices without float64

# ------------------------------------------------------------ an uneven epoch


def train_unevenly(job: Job) -> dict[str, Any]:
    """Train on uneven batches; return the largest difference between a parameter and that of a single process."""
    dtype = torch.float32 if job.device.type == "mps" else torch.float64
    network = _network(7, 5).to(job.device, dtype)
    reference = copy.deepcopy(network).cpu()
    # The first rank has no batch, unless it is alone.
    lengths = [0, *(3 + 2 * (index % 3) for index in range(job.world_size - 1))] if job.world_size > 1 else [3]
    batches = [_batches(rank, length, 4, 7, dtype) for rank, length in enumerate(lengths)]
    ddp = _wrap(network, job)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    with Join([ddp, optimizer], timeout=TIMEOUT) as join:
        for batch in join.batches([batch.to(job.device) for batch in batches[job.rank]]):
            _take_step(ddp, optimizer, batch)
    _train_in_one_process(reference, batches)
    pairs = zip(network.parameters(), reference.parameters(), strict=True)
    difference = max((one.detach().cpu() - other.detach()).abs().max().item() for one, other in pairs)
    bound = _BOUNDS[dtype]
    return {"batches": lengths[job.rank], "difference": f"{difference:.1e}", "bound": bound}  # it may be NaN


def _train_in_one_process(network: nn.Module, batches: Sequence[Sequence[Tensor]]) -> None:
    """Train as the ranks do together: each step uses the sum of the active ranks' gradients over the world size."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for step in range(max(map(len, batches))):
        optimizer.zero_grad()
        for own in batches:
            if step < len(own):
                (loss_of(network(own[step])) / len(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def judge_epoch(by_rank: Sequence[dict[str, Any]]) -> Finding:
    """Compare the largest difference on all ranks with the bound for rounding."""
    differences, bound = [float(each["difference"]) for each in by_rank], by_rank[0]["bound"]
    worst = math.nan if any(map(math.isnan, differences)) else max(differences)
    shown = ", ".join(str(each["batches"]) for each in by_rank[:4]) + (", ..." if len(by_rank) > 4 else "")
    text = f"ranks with {shown} batches differ by at most {worst:.1e} from one process (rounding explains {bound:.0e})"
    remedy = "" if worst <= bound else "Do not train on uneven data here, and report this with the output of --json."
    return Finding("epoch", "failed" if remedy else "ok", text, remedy, {"ranks": [*by_rank]})


_REMEDY = "If the checks before passed, report this with the output of --json."
EPOCH = Check("epoch", train_unevenly, judge_epoch, seconds=40.0, needs="links", remedy=_REMEDY)

# ------------------------------------------------------------ the cost

_PAIRS, _STEPS, _WARM_UP = 12, 8, 2
_WARNS_ABOVE = 1.2


def measure(job: Job) -> list[tuple[float, float]]:
    """Return, for each pair, the milliseconds of an even step with plain DDP, and with `Join`."""
    width, samples = (2048, 2048) if job.device.type == "cuda" else (256, 128)  # about 5 ms of one core
    ddp = _wrap(_network(width, width, width, width).to(job.device), job)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    batches = [batch.to(job.device) for batch in _batches(job.rank, 1, samples, width, torch.float32)]
    batches *= _WARM_UP + _STEPS

    def time_steps(joins: bool) -> float:
        starts = []
        with Join([ddp, optimizer], timeout=TIMEOUT) if joins else nullcontext() as join:
            for batch in batches if join is None else join.batches(batches):
                starts.append(_now(job))
                _take_step(ddp, optimizer, batch)
            return 1000 * (_now(job) - starts[_WARM_UP]) / _STEPS

    pairs = []
    for index in range(_PAIRS + 1):
        one, other = time_steps(bool(index % 2)), time_steps(not index % 2)
        pairs.append((other, one) if index % 2 else (one, other))
    return pairs[1:]  # DDP rebuilds its buckets in the first pair


def _now(job: Job) -> float:
    if job.device.type != "cpu":
        torch.accelerator.synchronize(job.device)
    return time.perf_counter()


def judge_cost(by_rank: Sequence[Sequence[tuple[float, float]]]) -> Finding:
    """Report the median step, and the median of the pairs' ratios."""
    slowest = [[*map(max, zip(*ranks, strict=True))] for ranks in zip(*by_rank, strict=True)]
    plain, joined = (statistics.median(times) for times in zip(*slowest, strict=True))
    ratio = statistics.median(with_join / without for without, with_join in slowest)
    text = f"an even step takes {plain:.2f} ms with plain DDP, {joined:.2f} ms with Join: {ratio:.2f} times as long"
    data = {"plain_ms": plain, "join_ms": joined, "ratio": ratio, "pairs": slowest}
    remedy = "Measure again on an idle machine. Such short steps show the cost of each call."
    is_well = ratio <= _WARNS_ABOVE
    return Finding("cost", "ok" if is_well else "warning", text, "" if is_well else remedy, data)


COST = Check("cost", measure, judge_cost, seconds=60.0, needs="epoch")

# ------------------------------------------------------------ the model and its data


def _network(*widths: int) -> nn.Module:
    torch.manual_seed(_SEED)
    pairs = zip(widths, (*widths[1:], widths[0]), strict=True)
    return nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh())))


def _batches(rank: int, count: int, samples: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(_SEED + rank)
    return [torch.randn(samples, width, generator=generator, dtype=dtype) for _ in range(count)]


def _wrap(network: nn.Module, job: Job) -> DistributedDataParallel:
    return DistributedDataParallel(network, device_ids=None if job.device.type == "cpu" else [job.device.index])


def _take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(batch)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def loss_of(output: Tensor) -> Tensor:
    """Return the mean of the squares."""
    return (output**2).mean()
