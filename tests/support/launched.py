"""A program that launches its ranks itself: `python -m tests.support.launched STRATEGY`."""

import logging
import sys
import warnings

from lightning_join import JoinCallback
from tests.support.cases import Case, Module, build_trainer, difference, reference

CASE = Case((2, 5), epochs=2)

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = sys.argv[1]
    module = Module(CASE)
    callbacks = [] if "join" in strategy else [JoinCallback()]
    trainer = build_trainer(CASE, strategy=strategy, callbacks=callbacks)
    trainer.fit(module)  # the ranks are other processes, whose weights come back
    expected = reference(CASE)
    print(f"off by {difference(list(module.net.parameters()), list(expected.net.parameters()))}")
