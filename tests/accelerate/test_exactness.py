"""Accelerate under the context: the parameters are those that one process would have computed."""

import pytest

from tests.covering import others_long
from tests.support.front_ends.accelerate import Script, Trained, expected_of, train
from tests.support.run import TOLERANCE, difference, same_bits
from tests.support.workers import Workers

SCRIPTS = {
    # Accelerate shards: the last process has no batch, or one less, or the last batch is short.
    "3 samples on 2": Script(samples=3, batch_size=1),
    "one batch": Script(samples=2, batch_size=3, optimizer="sgd"),
    "3 ranks": Script(processes=3, samples=25, optimizer="zero"),
    "3 ranks, one batch": Script(processes=3, samples=3, optimizer="sgd", scheduler="step"),
    "accumulate 2": Script(samples=32, accumulate=2, clip=0.05, scheduler="step"),
    "accumulate 3": Script(samples=31, accumulate=3, scheduler="epoch"),
    "accumulate 3, 3 ranks": Script(processes=3, samples=40, accumulate=3, optimizer="zero", clip=0.05),
    "scheduler on its own": Script(samples=20, scheduler="step", step_scheduler_with_optimizer=False, accumulate=2),
    "active": Script(samples=20, weighting="active", accumulate=2),
    "samples": Script(samples=20, weighting="samples", accumulate=2, scheduler="step"),
    "then even": Script(samples=20, even=2, accumulate=3, scheduler="step"),
    "function": Script(samples=20, own_function=True, optimizer="sgd", clip=0.05),
    "heartbeat": Script(samples=20, may_break=True, accumulate=2),
    # The user has: any lengths, so that the main process joins first or has no batch.
    "main first": Script(lengths=(2, 7), accumulate=2, scheduler="step", even=1),
    "main has none": Script(lengths=(0, 5), optimizer="sgd", accumulate=3),
    "main first, zero": Script(lengths=(3, 8), optimizer="zero", clip=0.05, scheduler="step"),
    "main first, samples": Script(lengths=(2, 6), weighting="samples"),
    "main first, active": Script(lengths=(1, 6, 4), weighting="active", accumulate=3),
    "none in the middle": Script(lengths=(4, 0, 7), optimizer="zero", accumulate=2, even=1),
    "iterable": Script(lengths=(2, 7), iterable=True, accumulate=2),
    "iterable, main last": Script(lengths=(6, 0, 3), iterable=True, optimizer="sgd", clip=0.05),
    # Accelerate's other loaders; those of iterables, and dispatched ones, are even.
    "split batches": Script(samples=19, batch_size=6, loader={"split_batches": True}, scheduler="step"),
    "split batches, 3 ranks": Script(
        processes=3, samples=37, batch_size=6, loader={"split_batches": True}, accumulate=2
    ),
    "dispatched": Script(samples=24, loader={"dispatch_batches": True}, accumulate=2),
    "dispatched, split": Script(samples=24, batch_size=6, loader={"dispatch_batches": True, "split_batches": True}),
    "dispatched stream": Script(samples=24, iterable=True, accumulate=3, clip=0.05),
    "stream in shards": Script(samples=24, iterable=True, loader={"dispatch_batches": False}, scheduler="step"),
    "another sampler": Script(samples=25, loader={"use_seedable_sampler": False}, accumulate=2),
    "stateful": Script(samples=25, loader={"use_stateful_dataloader": True}, accumulate=2, optimizer="sgd"),
    "scaler": Script(lengths=(2, 6), scaler=8.0, optimizer="sgd", scheduler="step"),
    "scaler, epochs": Script(lengths=(1, 4), batch_size=2, scaler=8.0, scheduler="epoch", epochs=8),
    "scaler, sharded": Script(samples=32, scaler=8.0, accumulate=2),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_as_one_process(workers: Workers, script: Script) -> None:
    found: list[Trained] = workers.run(script.world_size, train, script)
    for trained in found[1:]:
        assert same_bits(trained.parameters, found[0].parameters)
        assert trained.same == found[0].same
    everything = {n for n in script.all_samples() if n < 9000}
    for epoch in range(script.epochs):
        seen = [number for trained in found for numbers in trained.seen[epoch] for number in numbers]
        assert sorted(seen) == sorted(everything)
        longest = max(len(trained.seen[epoch]) for trained in found)
        for trained in found:
            assert trained.ends[epoch] == [step + 1 == longest for step in range(len(trained.seen[epoch]))]
    expected = expected_of(script, [trained.seen for trained in found])
    assert difference(found[0].parameters, expected.parameters) < TOLERANCE


REBALANCED = {name: script for name, script in SCRIPTS.items() if name not in ("heartbeat", "stateful")}


@pytest.mark.parametrize("name", others_long(REBALANCED, *[*REBALANCED][::4]))
def test_as_one_process_with_the_same_schedule(workers: Workers, name: str) -> None:
    script = REBALANCED[name].but(rebalance=True)
    test_as_one_process(workers, script)


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", [(9, 1), (0, 7), (1, 8, 2)])
@pytest.mark.parametrize("iterable", [False, True])
def test_an_epoch_has_as_many_steps_as_batches_by_ranks(
    workers: Workers, lengths: tuple[int, ...], iterable: bool
) -> None:
    script = Script(lengths=lengths, iterable=iterable, rebalance=True)
    found: list[Trained] = workers.run(len(lengths), train, script)
    assert [max(len(rank.seen[epoch]) for rank in found) for epoch in range(3)] == [
        -(-sum(lengths) // len(lengths))
    ] * 3


def test_each_epoch_is_shuffled_anew(workers: Workers) -> None:
    found: list[Trained] = workers.run(2, train, SCRIPTS["3 samples on 2"].but(samples=21))
    orders = [[n for numbers in found[0].seen[epoch] for n in numbers] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
