"""Mistakes: what one rank does, and the others do not."""

import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests.soak.hangs.script import BadSampleError, Script

Action = Callable[[Script], None]
LOOPS = ("plain", "fabric", "accelerate")
SHARDED = ("fsdp1", "fsdp2")
STEPS = (*LOOPS, *SHARDED, "lightning", "manual")  # whose step a program writes
ALL = (*STEPS, "transformers")


def barrier(it: Script) -> None:
    dist.barrier()


def all_reduce(it: Script) -> None:
    dist.all_reduce(torch.ones(3))


def objects(it: Script) -> None:
    dist.all_gather_object([None] * it.world_size, it.rank)


def gather(it: Script) -> None:
    dist.all_gather([torch.ones(2) for _ in range(it.world_size)], torch.ones(2))


def reduce(it: Script) -> None:
    dist.reduce(torch.ones(2), it.case.who)


def waited(it: Script) -> None:
    """Wait for an asynchronous collective."""
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()


def own_forward(it: Script) -> None:
    """Show what the model makes of some samples, as many do at an epoch's end."""
    it.model.eval()
    with torch.no_grad():
        it.model(torch.ones(3, 3, dtype=torch.float64))
    it.model.train()


def metric(it: Script) -> None:
    """Compute a metric, which is synchronized."""
    from torchmetrics import MeanMetric

    mean = MeanMetric()
    mean.update(torch.tensor(1.0))
    mean.compute()


def saved(it: Script) -> None:
    """Save on this rank, and wait for the others."""
    torch.save(it.net.state_dict(), io.BytesIO())
    dist.barrier()


def more_often(it: Script) -> None:
    """Sum in a loop that is longer on one rank."""
    for _ in range(2 + it.hits):
        dist.all_reduce(torch.ones(2))


def another_operation(it: Script) -> None:
    if it.hits:
        dist.all_gather([torch.ones(3) for _ in range(it.world_size)], torch.ones(3))
    else:
        dist.all_reduce(torch.ones(3))


def makes_groups(it: Script) -> None:
    it.tools["groups"] = [dist.new_group(), dist.new_group()]


def other_order(it: Script) -> None:
    """Sum in two groups, in another order on one rank."""
    for group in it.tools["groups"][:: -1 if it.hits else 1]:
        dist.all_reduce(torch.ones(2), group=group)


def hooks(it: Script) -> None:
    """Sum in a hook of a gradient."""

    def in_hook(gradient: torch.Tensor) -> None:
        dist.all_reduce(torch.ones(2))

    it.loss_tensor.register_hook(in_hook)


def whole_state(it: Script) -> None:
    """Gather a sharded model, on one rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    get_model_state_dict(it.model, options=StateDictOptions(full_state_dict=True))


def raises(it: Script) -> None:
    raise BadSampleError("bad sample")


# What the front ends have of their own.


def fabric_barrier(it: Script) -> None:
    it.tools["fabric"].barrier()


def fabric_sum(it: Script) -> None:
    it.tools["fabric"].all_reduce(torch.ones(2))


def fabric_save(it: Script) -> None:
    with tempfile.TemporaryDirectory() as folder:
        it.tools["fabric"].save(f"{folder}/a.ckpt", {"model": it.model})


def wait_for_everyone(it: Script) -> None:
    it.tools["accelerator"].wait_for_everyone()


def accelerator_gather(it: Script) -> None:
    it.tools["accelerator"].gather(torch.ones(2))


def accelerator_save(it: Script) -> None:
    with tempfile.TemporaryDirectory() as folder:
        it.tools["accelerator"].save_state(folder)


def trainer_save(it: Script) -> None:
    with tempfile.TemporaryDirectory() as folder:
        it.tools["trainer"].save_checkpoint(f"{folder}/a.ckpt")


def trainer_barrier(it: Script) -> None:
    it.tools["trainer"].strategy.barrier()


def module_gather(it: Script) -> None:
    it.tools["module"].all_gather(torch.ones(2))


def stop(it: Script) -> None:
    it.tools["trainer"].should_stop = True


def control_stop(it: Script) -> None:
    it.tools["control"].should_training_stop = True


def control_epoch_stop(it: Script) -> None:
    it.tools["control"].should_epoch_stop = True


def evaluates(it: Script) -> None:
    it.tools["trainer"].evaluate([{"x": x} for x in torch.ones(4, 3, dtype=torch.float64)])


@dataclass(frozen=True)
class Slip:
    """A mistake.

    Attributes:
        front_ends: Where it can be made.
        place: In which a step's function makes it; without one it is a way out of the step.
        action: Made by one rank, or, if `by_all`, called by all ranks with that batch.
        before: Called by all ranks before their loop.
        inside: The function in which the rank that makes it stays, where that is known.
        buffers: Whether it needs a model with buffers.
        proven: Whether it can be: not where the user's code waits, which may end.
    """

    front_ends: tuple[str, ...]
    place: str = ""
    action: Action | None = None
    by_all: bool = False
    before: Action | None = None
    inside: str = ""
    buffers: bool = False
    proven: bool = True


def _at(place: str, action: Action, front_ends: tuple[str, ...] = ALL, **more: object) -> Slip:
    return Slip(front_ends, place, action, **{"inside": action.__name__, **more})  # type: ignore[arg-type]


SLIPS = {
    "continue": Slip((*LOOPS, *SHARDED, "manual")),
    "nan": Slip(STEPS),
    "swallowed": Slip((*LOOPS, *SHARDED), "begin", raises),
    "swallowed after forward": Slip((*LOOPS, *SHARDED), "between", raises),
    "break": Slip((*LOOPS, *SHARDED, "lightning", "manual")),
    "return": Slip((*LOOPS, *SHARDED)),
    "epoch less": Slip((*LOOPS, *SHARDED)),
    "no sync": Slip(("plain", "fabric", "accelerate")),
    "second model": Slip(("plain",)),
    "barrier": _at("end", barrier),
    "barrier before forward": _at("begin", barrier, STEPS),
    "barrier after forward": _at("between", barrier),
    "barrier in loader": _at("loader", barrier),
    "all_reduce": _at("end", all_reduce),
    "all_reduce after forward": _at("between", all_reduce),
    "objects": _at("end", objects),
    "all_gather": _at("end", gather),
    "reduce": _at("end", reduce),
    "waited": _at("end", waited, proven=False),
    "own forward": _at("end", own_forward, ("plain", "fabric", "accelerate", "lightning", "manual"), buffers=True),
    "metric": _at("end", metric),
    "saved": _at("end", saved),
    "more often": _at("end", more_often, by_all=True),
    "another operation": _at("end", another_operation, by_all=True),
    "other order": _at("end", other_order, by_all=True, before=makes_groups),
    "in hook": _at("between", hooks, inside="in_hook"),
    "whole state": _at("end", whole_state, SHARDED),
    "fabric barrier": _at("end", fabric_barrier, ("fabric",)),
    "fabric sum": _at("end", fabric_sum, ("fabric",)),
    "fabric save": _at("end", fabric_save, ("fabric",)),
    "wait_for_everyone": _at("end", wait_for_everyone, ("accelerate",)),
    "accelerator gather": _at("end", accelerator_gather, ("accelerate",)),
    "accelerator save": _at("end", accelerator_save, ("accelerate",)),
    "trainer save": _at("end", trainer_save, ("lightning", "manual")),
    "trainer barrier": _at("end", trainer_barrier, ("lightning", "manual")),
    "module gather": _at("end", module_gather, ("lightning", "manual")),
    "stop": Slip(("lightning", "manual"), "end", stop),
    "control stop": Slip(("transformers",), "end", control_stop),
    "control epoch stop": Slip(("transformers",), "end", control_epoch_stop),
    "evaluates": _at("end", evaluates, ("transformers",)),
}


def commit(it: Script) -> None:
    """Have a script make its mistake."""
    (name,) = it.case.what
    slip = SLIPS[name]
    it.slip = name if slip.action is None else ""
    if slip.before is not None:
        it.add("before", slip.before)
    action = slip.action
    if action is None:
        return

    def at_its_batch(it: Script) -> None:
        reads = slip.place == "loader"  # which is called at the batch, on its rank
        if reads or it.hits or (slip.by_all and (it.epoch, it.step) == (0, it.case.at)):
            action(it)

    it.add(slip.place, at_its_batch)
