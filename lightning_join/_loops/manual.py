"""Manual optimization: a real `training_step` or its shadow."""

from collections import OrderedDict
from typing import Any

from lightning_join._compat import ManualOptimization
from lightning_join._loops.user_code import NoStopIteration, shadow_step
from lightning_join._protocol import join_of


class JoinManualOptimization(ManualOptimization):
    """Lightning's manual optimization, in which a joined rank repeats what the others' `training_step` trains."""

    def run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        with join_of(self.trainer).around_step():
            return super().run(kwargs)

    def advance(self, kwargs: OrderedDict[str, Any]) -> None:
        # Inside of what suppresses it, else it would end one rank's step alone, and in silence.
        with NoStopIteration():
            if join_of(self.trainer).joined:
                self._output = {"loss": shadow_step(self.trainer).detach()}
            else:
                super().advance(kwargs)
