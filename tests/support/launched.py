"""A program that launches its ranks itself: `python -m tests.support.launched STRATEGY`."""

import logging
import sys
import warnings
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_join import JoinCallback
from tests.support.front_ends.lightning import Fit, Module, build_trainer
from tests.support.run import difference, reference
from tests.support.sharded_fits import ShardedModule, build_sharded, build_strategy, on_cpus

CASE = Fit((2, 5), epochs=2)

_patches = on_cpus()
_patches.__enter__()  # in the processes that it starts too

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    name = sys.argv[1]
    module: Any
    if name.startswith("fsdp"):
        start_method = StrategyRegistry[name]["init_params"]["start_method"]
        module = ShardedModule(CASE)
        trainer = build_sharded("fsdp", CASE, strategy=build_strategy("fsdp", CASE, start_method=start_method))
    else:
        module = Module(CASE)
        trainer = build_trainer(CASE, strategy=name, callbacks=[] if "join" in name else [JoinCallback()])
    trainer.fit(module)  # the ranks are other processes, whose weights come back
    print(f"off by {difference(list(module.net.parameters()), list(reference(CASE).net.parameters()))}")
