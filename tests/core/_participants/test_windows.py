"""Windows of accumulation around which gradients are kept, cleared or changed, where ranks join amid one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

from tests.support.front_ends.plain import Loop, assert_exact, train
from tests.support.run import Batch, reference
from tests.support.workers import Workers

# In which steps gradients are cleared, where the last one of each `window` syncs.
CLEARS: dict[str, Callable[[int, int], bool]] = {
    "an average kept, and cleared amid the next window": lambda step, window: step % (2 * window) in (0, window + 1),
    "cleared before a late meeting": lambda step, window: step % window in (0, 1),
    "an average kept that nobody uses": lambda step, window: step % (2 * window) == 0,
    "cleared, and used by nobody but ranks that join": lambda step, window: step % window in (0, 1),
}
LENGTHS = [((3, 5, 8), 4), ((0, 7, 8), 4), ((8, 5, 3), 2), ((3, 8, 5), 3)]


@dataclass(frozen=True)
class Windows(Loop):
    """A loop over windows, of which some steps use the extra parameters, or those of ranks that join."""

    epochs: int = 1
    model: str = "unused"
    ragged: bool = True
    kind: str = "clipped"

    def begins_window(self, epoch: int, step: int) -> bool:
        return CLEARS.get(self.kind, CLEARS["cleared before a late meeting"])(step, self.accumulate)

    def uses_extra(self, rank: int, step: int) -> bool:
        if "ranks that join" in self.kind:
            return bool(step + 1 == self.lengths[rank] < max(self.lengths))
        return step % (2 * self.accumulate) < self.accumulate or "nobody" not in self.kind

    def losses(self, model: Any, batch: Batch, rank: int, epoch: int, step: int) -> Iterator[Tensor]:
        yield from super().losses(model, batch, rank, epoch, step)
        if self.kind == "clipped" and not self.ends_window(epoch, step):
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def windows(kind: str, lengths: tuple[int, ...], window: int, loop: str) -> Windows:
    ddp = {"find_unused_parameters": "nobody" in kind}
    weighting = "samples" if loop == "samples" else "world"
    return Windows(lengths, kind=kind, accumulate=window, loop=loop, weighting=weighting, ddp=ddp)


@pytest.mark.covering(2)
@pytest.mark.parametrize("loop", ["sized", "heartbeat", "plain", "samples"])
@pytest.mark.parametrize(("lengths", "window"), LENGTHS)
@pytest.mark.parametrize("kind", CLEARS)
def test_it_is_what_one_process_computes(
    workers: Workers, kind: str, lengths: tuple[int, ...], window: int, loop: str
) -> None:
    run = windows(kind, lengths, window, loop)
    assert_exact(workers.run(run.world_size, train, run), reference(run))


@pytest.mark.parametrize("loop", ["sized", "heartbeat"])
def test_what_is_changed_amid_a_window_raises_on_all_ranks(workers: Workers, loop: str) -> None:
    for outcome in workers.outcomes(3, train, windows("clipped", *LENGTHS[0], loop), timeout=20.0):
        assert "A gradient was changed by hand (by clipping, for example) since the last backward" in outcome.error
