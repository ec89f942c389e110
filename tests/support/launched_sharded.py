"""A program that launches its ranks itself: `python -m tests.support.launched_sharded STRATEGY`."""

import logging
import sys

from lightning.pytorch.strategies import StrategyRegistry

from tests.support.cases import Case, difference, reference
from tests.support.sharded_fits import ShardedModule, build_sharded, build_strategy, on_cpus

CASE = Case((2, 5), epochs=2)

_patches = on_cpus()
_patches.__enter__()  # in the processes that it starts too

if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    start_method = StrategyRegistry[sys.argv[1]]["init_params"]["start_method"]
    module = ShardedModule(CASE)
    trainer = build_sharded("fsdp", CASE, strategy=build_strategy("fsdp", CASE, start_method=start_method))
    trainer.fit(module)  # the ranks are other processes, whose weights come back
    print(f"off by {difference(list(module.net.parameters()), list(reference(CASE).net.parameters()))}")
