"""Random fits whose steps change more than gradients, in Lightning, each compared with one process.

`scripts/test -m long tests/soak/test_step_changes.py` runs many, and `TORCH_JOIN_SEED=seed TORCH_JOIN_CASES=1` one.
"""

import random
import tempfile
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_join
from tests.support.many import note, seeds
from tests.support.run import difference
from tests.support.small import steps_of
from tests.support.step_changes import Student
from tests.support.student_module import StudentModule
from tests.support.workers import Workers

CHANGES = ("teacher", "projected", "clamped", "decay", "rate", "state", "halved", "centre", "reset")
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "NAdam", "Adagrad", "Rprop")
LENGTHS = ((2, 5), (0, 4), (5, 1), (3, 0), (4, 4), (1, 4, 3), (0, 5, 2), (5, 0, 3), (2, 2, 6))


@dataclass(frozen=True)
class Program:
    seed: int
    lengths: tuple[int, ...]
    changes: tuple[str, ...]
    optimizer: str
    weighting: str
    accumulate: int
    validates: float | int
    clip: float
    resumes: bool  # once more, from the end of the first epoch
    unused: bool
    epochs: int = 3


def draw(seed: int) -> Program:
    rng = random.Random(seed)
    return Program(
        seed,
        rng.choice(LENGTHS),
        tuple(sorted(rng.sample(CHANGES, rng.randint(1, 4)))),
        rng.choice(OPTIMIZERS),
        rng.choice(("world", "active", "samples")),
        rng.choice((1, 1, 1, 2, 3)),
        rng.choice((1, 2, 1.0)),
        rng.choice((0.0, 0.0, 0.5)),
        rng.random() < 0.3,
        rng.random() < 0.3,
    )


def rows(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(1 + (2 * rank + step) % 3, 4, generator=generator, dtype=torch.float64)


def reference(program: Program) -> list[list[Tensor]]:
    """Return the state after each epoch."""
    student, found, taken = Student(*program.changes, optimizer=program.optimizer), list[list[Tensor]](), 0
    optimizer = student.optimizer()
    for _ in range(program.epochs):
        steps = steps_of(program.lengths)
        for index, places in enumerate(steps):
            student.change(optimizer, taken)
            if index % program.accumulate == 0:
                optimizer.zero_grad()
            counts = [len(rows(*place)) if program.weighting == "samples" else 1 for place in places]
            total = len(program.lengths) if program.weighting == "world" else sum(counts)
            losses = [student.loss(rows(*place)) * n for place, n in zip(places, counts, strict=True)]
            (torch.stack(losses).sum() / total / program.accumulate).backward()
            if (index + 1) % program.accumulate == 0 or index + 1 == len(steps):
                if program.clip:
                    torch.nn.utils.clip_grad_norm_(student.net.parameters(), program.clip)
                optimizer.step()
                taken += 1
        found.append(student.state())
    return found


class Module(StudentModule):
    """Notes the student's state at each epoch's end too."""

    def __init__(self, program: Program) -> None:
        super().__init__(Student(*program.changes, optimizer=program.optimizer), program.lengths, rows)
        self.found: list[list[Tensor]] = []

    def on_train_epoch_end(self) -> None:
        self.found.append(self.student.state())


def fit(program: Program, **options: Any) -> Module:
    module = Module(program)
    trainer = pl.Trainer(
        strategy=lightning_join.DDPJoinStrategy(
            weighting=program.weighting,  # type: ignore[arg-type]
            find_unused_parameters=program.unused,
        ),
        accelerator="cpu",
        devices=len(program.lengths),
        max_epochs=program.epochs,
        accumulate_grad_batches=program.accumulate,
        gradient_clip_val=program.clip or None,
        val_check_interval=program.validates,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[options["saving"]] if "saving" in options else [],
        enable_checkpointing="saving" in options,
    )
    trainer.fit(module, ckpt_path=options.get("resumes"), weights_only=False)
    return module


def train(rank: int, program: Program) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return the state at each epoch's end, and at each validation."""
    with tempfile.TemporaryDirectory() as folder:
        if not program.resumes:
            module = fit(program)
            return module.found, module.seen
        whole = fit(program, saving=ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True))
        folders: list[Any] = [folder]
        torch.distributed.broadcast_object_list(folders)
        resumed = fit(program, resumes=f"{folders[0]}/epoch=0.ckpt")
        torch.distributed.barrier()
        return [*whole.found[:2], resumed.found[-1]], whole.seen


@seeds(few=range(2), many=300)
def test_each_is_as_one_process_trains(workers: Workers, seed: int) -> None:
    program = draw(seed)
    expected = reference(program)
    outcomes = workers.outcomes(len(program.lengths), train, program, deadline=120.0)
    said = [outcome.error for outcome in outcomes]
    off = [] if any(said) else [max(map(difference, outcome.value[0], expected)) for outcome in outcomes]
    first, *others = [] if any(said) else [outcome.value[1] for outcome in outcomes]
    ended = "error" if any(said) else "right" if max(off) < 1e-7 else "silent"
    note(seed, program, ended, 0.0)
    assert not any(said), (program, said)
    assert max(off) < 1e-7, (program, off)  # optimizers divide by roots of small numbers
    for other in others:  # what a validation reads is the same on all ranks
        assert len(other) == len(first)
        assert max(map(difference, first, other), default=0.0) == 0, program
