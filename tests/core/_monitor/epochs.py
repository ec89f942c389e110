"""Epochs of which all is known."""

from torch_join.integration import EpochRecord, RankRecord

STEP = 0.1  # seconds


def make_epochs(ranks: int, epochs: int, donates: bool = False, step: float = STEP) -> list[EpochRecord]:
    """Return epochs in which rank r has 10 batches more than rank r - 1, modulo 40, and rank 0 has none.

    A step takes `step` seconds.
    """
    found = []
    for number in range(epochs):
        lengths = [10 * (rank % 4) + (number % 3 if rank else 0) for rank in range(ranks)]
        end = max(lengths) * step or step
        found.append(
            EpochRecord.of(
                number,
                [
                    RankRecord(
                        batches=n,
                        shadow_steps=0,
                        joined_at=n,
                        active_seconds=n * step,
                        seconds=end,
                        given=3 if donates and rank == 1 else 0,
                        received=3 if donates and rank == 2 else 0,
                        given_bytes=3_000_000 if donates and rank == 1 else 0,
                        reading_seconds=n * step / 5,
                        counted=4.0 * n,
                    )
                    for rank, n in enumerate(lengths)
                ],
            )
        )
    return found
