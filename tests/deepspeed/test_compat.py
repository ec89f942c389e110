"""What of DeepSpeed an engine's part relies on."""

from tests.support import inside
from tests.support.front_ends.deepspeed import Net as Model
from tests.support.front_ends.deepspeed import Recipe, deepspeed_of, engine_of
from tests.support.workers import Workers


def lacking(rank: int) -> list[str]:
    """Return what the objects of an engine of each stage lack."""
    found = []
    with deepspeed_of(rank) as deepspeed:
        for stage in (0, 1, 2, 3):
            engine, _ = engine_of(deepspeed, Recipe(stage=stage), Model())
            found += [f"{stage}: {name}" for name in inside.lacking_of_engine(engine)]
    return found


def test_each_private_name_is_there(workers: Workers) -> None:
    assert workers.run(2, lacking, deadline=60.0) == [[], []]
