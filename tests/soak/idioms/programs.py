"""Programs that are drawn from a seed, and their loops."""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.soak.idioms.losses import LOSSES
from tests.soak.idioms.models import MODELS, OPTIMIZERS, SCHEDULES, UNUSED
from tests.soak.idioms.steps import STEPS
from tests.soak.idioms.training import AFTER, CHANGES, DDP, Training
from tests.soak.idioms.worlds import Batch, Joined

COLLECTIVES = ("sum", "largest", "objects", "broadcast", "barrier", "rate")
EXTRAS = (
    *("average", "torch average", "teacher", "average of rank 0", "forgotten average", "scaler", "lookahead"),
    *("hooked gradients", "clipping hook", "tau", "center", "counted forwards", "skipped steps", "schedule by epoch"),
    *("evaluation", "swapped evaluation", "new rate", "copied", "loaded again", "frozen late", "resumed"),
    *AFTER,
)


@dataclass(frozen=True)
class Program:
    """What is trained, and how; each word is a name in one of the tables."""

    seed: int
    lengths: tuple[int, ...]
    weighting: str = "world"
    model: str = "layers"
    optimizer: str = "sgd"
    split: str = "one"  # or "groups"; "two" optimizers
    ddp: str = "usual"
    loss: str = "simple"
    step: str = "plain"
    clear: str = "optimizer"  # or "model", "by hand", "to zeros"
    schedule: str = ""
    loop: str = "for"
    leaves: tuple[int, ...] = ()  # after how many batches each rank breaks
    extras: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    rows: int | None = None  # of a batch, if all have the same number
    epochs: int = 2

    def __str__(self) -> str:
        said = [f"{f.name}={value!r}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return f"Program({', '.join(said)})"


# -------------------------------------------------------------------- loops

Walk = Callable[[Training, Any, list[Any], Any], Iterator[tuple[int, Any]]]


def _asks_for_next(t: Training, join: Any, mine: list[Any], batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    iterator = iter(join.batches(batches))
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield join.step, batch


def _keeps_its_iterator(t: Training, join: Any, mine: list[Any], batches: Any) -> Iterator[tuple[int, Any]]:
    t.iterator = iter(join.batches(batches))
    for _ in range(t.world.limit(len(mine))):
        batch = next(t.iterator, None) if t.world.reference else next(t.iterator)
        if batch is None:
            return
        yield join.step, batch


def _breaks_at_its_last(t: Training, join: Any, mine: list[Any], batches: Any) -> Iterator[tuple[int, Any]]:
    for number, batch in enumerate(join.batches(batches)):
        yield number, batch
        if number + 1 == t.world.limit(len(mine)):
            break


def _breaks_by_progress(t: Training, join: Any, mine: list[Any], batches: Any) -> Iterator[tuple[int, Any]]:
    for number, batch in enumerate(join.batches(batches)):
        if t.progress.steps >= 7:
            break
        yield number, batch


def _breaks_apart(t: Training, join: Any, mine: list[Any], batches: Any) -> Iterator[tuple[int, Any]]:
    limit = t.program.leaves[t.world.rank]
    for number, batch in enumerate(join.batches(t.world.shorten(batches, limit))):
        yield number, batch
        if number + 1 == t.world.limit(limit):
            break


def _usual(t: Training, join: Any, mine: list[Any], batches: Any) -> Iterator[tuple[int, Any]]:
    for batch in join.batches(batches):
        yield join.step, batch


LOOPS: dict[str, Walk] = {
    "for": _usual,
    "loader": _usual,
    "shuffled loader": _usual,
    "stream": _usual,
    "with each": _usual,
    "entered again": _usual,
    "two loops": _usual,
    "next": _asks_for_next,
    "kept iterator": _keeps_its_iterator,
    "zip": lambda t, join, mine, b: zip(range(t.world.limit(len(mine))), join.batches(b), strict=False),
    "islice": lambda t, join, mine, b: enumerate(islice(join.batches(b), t.world.limit(len(mine)))),
    "breaks at its last": _breaks_at_its_last,
    "breaks by progress": _breaks_by_progress,
    "breaks apart": _breaks_apart,
    "plain for": lambda t, join, mine, b: enumerate(t.world.plain(join, b)),
}
OWN_WITH = ("with each", "plain for", "breaks apart")


class Execution:
    """A program in one of the worlds."""

    def __init__(self, world: Joined, program: Program) -> None:
        self.world, self.program = world, program

    def run(self) -> None:
        training = Training(self.world, self.program)
        self._train(training, "")
        if "resumed" in self.program.extras:
            every: list[Any] = [None] * self.world.size
            dist.all_gather_object(every, training.saved)
            saved = next((each for each in every if each is not None), None)
            if saved is not None:
                again = Training(self.world, self.program)
                for name, thing in self._states(again).items():
                    thing.load_state_dict(saved[name])
                self._train(again, "resumed ", saved["join"])

    def _states(self, t: Training) -> dict[str, Any]:
        things = [t.net, *([t.other] if t.other is not None else []), *t.given[1 + (t.other is not None) :]]
        return {str(place): thing for place, thing in enumerate([*things, *t.schedulers])}

    def _train(self, t: Training, name: str, place: Any = None) -> None:
        program, world = self.program, self.world
        options = {"may_break": True} if program.loop == "breaks apart" else {}
        inside = program.loop in (*OWN_WITH, "entered again")
        join: Any = None
        with ExitStack() as whole:
            for epoch in range(program.epochs):
                if join is None or program.loop in OWN_WITH:
                    t.join = join = world.join(t.given, **options)
                    if not inside:
                        whole.enter_context(join)
                with join if inside else nullcontext():
                    self._epoch(t, join, epoch, f"{name}{epoch}", place)
                place = None
                t.keep(f"{name}{epoch}")
        t.keep(f"{name}end")

    def _epoch(self, t: Training, join: Any, epoch: int, name: str, place: Any) -> None:
        program, world = self.program, self.world
        if place is not None:
            join.load_state_dict(place)
        self._loop(t, join, world.data(epoch, world.lengths[world.rank], program.rows), name)
        if program.loop != "plain for":
            world.keep(f"{name} read", t.net.state_dict())
            if program.loop == "two loops":
                length = world.lengths[(world.rank + 1 + epoch) % world.size]
                self._loop(t, join, world.data(10 + epoch, length, program.rows), name)
            self._after(t, join, epoch)

    def _loop(self, t: Training, join: Any, mine: list[Batch], name: str) -> None:
        program, world = self.program, self.world
        batches: Any = mine
        if program.loop == "loader":
            batches = DataLoader(mine, batch_size=None)  # type: ignore[arg-type]
        elif program.loop == "shuffled loader" and mine:
            generator = torch.Generator().manual_seed(program.seed + world.rank)
            batches = DataLoader(mine, batch_size=None, shuffle=True, generator=generator)  # type: ignore[arg-type]
        elif program.loop == "stream":
            batches = (batch for batch in mine)
        if program.step == "over windows":
            batches = mine = world.windows(batches, 2)  # type: ignore[assignment]
        for number, batch in LOOPS[program.loop](t, join, mine, batches):
            STEPS[program.step](t, batch, number)
            if "resumed" in program.extras and name == "0" and number == 1:
                states = {key: thing.state_dict() for key, thing in self._states(t).items()}
                t.saved = copy.deepcopy({"join": join.state_dict(), **states})

    def _after(self, t: Training, join: Any, epoch: int) -> None:
        extras, world = self.program.extras, self.world
        if "schedule by epoch" in extras:
            for scheduler in t.schedulers:
                scheduler.step(*([1.0] if self.program.schedule == "plateau" else []))
        if "evaluation" in extras or "swapped evaluation" in extras:
            self._evaluate(t, join, epoch)
        if "copied" in extras:
            world.keep(f"{epoch} copy", copy.deepcopy(t.net))
        if "new rate" in extras:
            for optimizer in t.plain:
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * 0.7
        if "frozen late" in extras:
            t.parameters[0].requires_grad_(False)
        if "loaded again" in extras:
            for thing in (t.net, *t.optimizers):
                thing.load_state_dict(copy.deepcopy(thing.state_dict()))

    def _evaluate(self, t: Training, join: Any, epoch: int) -> None:
        """Sum up the loss over uneven data, perhaps with the average's parameters."""
        world = self.world
        swapped = copy.deepcopy(t.net.state_dict()) if "swapped evaluation" in self.program.extras else None
        if swapped is not None:
            with torch.no_grad():
                for p in t.parameters:
                    p.mul_(0.5)
        t.model.eval()
        total = torch.zeros(2)
        with torch.no_grad():
            for x, y in join.batches(world.data(20 + epoch, (2 * world.rank + epoch) % 4, 3)):
                total += world.own(torch.stack([functional.mse_loss(t.model(x), y), torch.tensor(1.0)]))
        dist.all_reduce(total)
        t.model.train()
        if swapped is not None:
            t.net.load_state_dict(swapped)
        world.keep(f"{epoch} evaluated", total)


# -------------------------------------------------------------------- drawing

SEVERAL_FORWARDS = ("inner step", "two forwards", "triplet", "target", "evaluated", "tangent", "adversarial")
ONE_FORWARD = ("simple", "regularized", "hooked", "by all rows", "above mean", "mixed", "hardest", "saved")
UNSYNCED = (
    *("over windows", "unsynced", "unsynced over epochs", "synced over epochs", "skips"),
    *("own sharpness", "own average", "own sum"),
)
BUFFERS = ("batch norm", "spectral norm", "old spectral norm", "taking", "cooling", "codebook", "extra")


def draw(seed: int, attempt: int = 0) -> Program:
    """Return the program of a seed; where its reference fails, another attempt has another one."""
    pick = random.Random(f"{seed}/{attempt}")
    size = pick.choice((2, 2, 3))
    lengths = [pick.choice((0, 1, 2, 3, 4, 5)) for _ in range(size)]
    if not any(lengths) or pick.random() < 0.15:
        lengths = [pick.choice((2, 3, 4))] * size

    def some(names: Sequence[str], *numbers: int) -> tuple[str, ...]:
        return tuple(pick.sample([*names], pick.choice(numbers)))

    program = Program(
        seed=seed,
        lengths=tuple(lengths),
        weighting=pick.choice(("world", "world", "active", "samples", "count")),
        model=pick.choice([*MODELS]),
        optimizer=pick.choice([*OPTIMIZERS]),
        split=pick.choice(("one", "one", "groups", "two")),
        ddp=pick.choice([*DDP, "usual", "own buffers"]),
        loss=pick.choice([*LOSSES, "simple", "simple"]),
        step=pick.choice([*STEPS, "plain", "plain", "plain"]),
        clear=pick.choice(("optimizer", "optimizer", "model", "by hand", "to zeros")),
        schedule=pick.choice(["", "", *SCHEDULES]),
        loop=pick.choice([*LOOPS, "for"]),
        leaves=tuple(pick.choice((1, 2, 3, 4)) for _ in lengths),
        extras=some(EXTRAS, 0, 1, 1, 2, 3),
        changes=some([*CHANGES], 0, 0, 1, 2),
        collectives=some(COLLECTIVES, 0, 0, 1, 2),
        rows=pick.choice((None, None, 4)),
        epochs=pick.choice((2, 2, 3)),
    )
    return fit(program, pick)


def fit(p: Program, pick: random.Random) -> Program:
    """Change what does not go together: in plain DDP, in the documents, or in what the reference can tell."""

    def without(*names: str) -> tuple[str, ...]:
        return tuple(extra for extra in p.extras if extra not in names)

    if p.loop != "breaks apart":
        p = replace(p, leaves=())
    if p.step in ("adversaries", "two models"):  # which have losses of their own
        p = replace(p, loss="simple", extras=without("teacher", "tau", "center", "counted forwards", "scaler"))
    if p.model in UNUSED:
        p = replace(p, ddp=pick.choice(("finds unused", "own buffers")), extras=without("freezes", "teacher"))
        p = replace(p, loss=p.loss if p.loss in ONE_FORWARD else "simple")
        p = replace(p, step=pick.choice(("plain", "clears after", "unsynced")))
    if p.model == "sparse":
        p = replace(p, optimizer="sgd", changes=(), split="one", ddp=pick.choice(("usual", "own buffers")))
        p = replace(p, step=pick.choice(("plain", "clears after", "unsynced", "two backwards")))
        p = replace(
            p, loss=pick.choice(("simple", "target", "hooked", "by all rows")), extras=without("scaler", "lookahead")
        )
    if p.model == "filtered":
        p = replace(p, changes=(), optimizer=pick.choice(("sgd", "momentum", "adam")))
    if p.loss.startswith("contrast"):
        p = replace(p, rows=4, weighting=pick.choice(("world", "active")), step=pick.choice(("plain", "clears after")))
        p = replace(p, model=pick.choice(("layers", "layer norm", "tied", "twice")), extras=without("teacher"))
    if {"freezes", "frozen late"} & {*p.extras}:
        p = replace(p, ddp="finds unused", loss="simple")
    if p.ddp == "static" and (p.step not in ("plain", "clears after") or p.loss not in ONE_FORWARD):
        p = replace(p, ddp="views")
    several = p.loss in SEVERAL_FORWARDS or "teacher" in p.extras or p.step in ("two backwards", "adversaries")
    if several and (p.model in BUFFERS or "tau" in p.extras):  # which DDP broadcasts in place
        p = replace(p, ddp="own buffers")
    if p.model == "batch norm":
        p = replace(p, rows=4)
    if p.ddp == "own buffers" and p.model in ("batch norm", "codebook"):  # each rank has its own
        p = replace(p, model="spectral norm")
    return _fit_form(p, pick)


def _fit_form(p: Program, pick: random.Random) -> Program:
    """Change what does not go with the form of the step and of the loop, or with the optimizer."""

    def without(*names: str) -> tuple[str, ...]:
        return tuple(extra for extra in p.extras if extra not in names)

    if p.optimizer == "lbfgs":
        p = replace(p, step="closure", split="one", model="layers", loss="simple", ddp="usual", changes=())
        p = replace(p, schedule="", extras=without("rolls back", "loaded again", "tau", "forgets state"))
    if p.optimizer == "zero":
        p = replace(p, split="one", extras=without("rolls back", "loaded again", "lookahead", "resumed", "scaler"))
    if p.step == "alternates":
        p = replace(p, split="two")
    if p.step in ("closure", "extragradient", "surgery"):
        p = replace(p, extras=without("scaler", "lookahead"))
    if p.step in ("own average", "own sum", "surgery") and (p.model in UNUSED or p.ddp == "finds unused"):
        p = replace(p, step="plain")
    if p.step in ("unsynced", "unsynced over epochs"):  # a weight belongs to a step
        p = replace(p, weighting="world")
    if p.weighting == "samples" and p.step == "over windows":
        p = replace(p, weighting="count")
    if p.weighting == "count" and p.step in ("synced over epochs", "two backwards", "surgery"):
        p = replace(p, weighting="samples")
    if p.step in ("unsynced", "unsynced over epochs", "synced over epochs"):
        p = replace(p, changes=())
    if p.loop == "plain for":  # a step begins with its forward
        p = replace(p, weighting="world" if p.weighting == "world" else "active")
        p = replace(p, loss="simple" if "all" in p.loss else p.loss)
        p = replace(p, extras=without("resumed"), step="plain" if p.step == "over windows" else p.step)
    if 0 in p.lengths and p.loop in ("zip", "islice", "kept iterator"):
        p = replace(p, loop="next")  # such a rank asks for nothing: it takes part when its next loop begins
    if min(p.lengths) < 3:  # what it rolls back to is a plain variable, which each rank sets in its first steps
        p = replace(p, extras=without("rolls back"))
    if p.step in UNSYNCED and p.model in ("batch norm", "codebook"):  # which a rank changes by itself between syncs
        p = replace(p, model="spectral norm")
    if p.loop == "breaks apart":  # what it loads after its evaluation is the old state that it is warned of
        p = replace(p, extras=without("swapped evaluation"))
    if p.loop == "kept iterator":  # nobody can tell what a rank changes after its last batch
        p = replace(p, extras=without("new rate", "schedule by epoch", "loaded again", "swapped evaluation"))
    if p.step == "own sharpness" and p.model in BUFFERS:  # a rank without a batch goes nowhere
        p = replace(p, model="layers")
    if "resumed" in p.extras:
        p = replace(p, loop=pick.choice(("for", "loader")), step=p.step if p.step != "over windows" else "plain")
    if p.step == "over windows" and p.loop in ("kept iterator", "zip", "islice", "breaks at its last", "breaks apart"):
        p = replace(p, loop="for", leaves=())
    return p
