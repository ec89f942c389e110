"""Lightning and Accelerate on an accelerator."""

from typing import Any

import pytest
import torch

from tests.support.front_ends import accelerate as accelerate_front_end
from tests.support.front_ends.accelerate import Script
from tests.support.front_ends.lightning import Fit, assert_exact, fit
from tests.support.run import difference
from tests.support.workers import Workers

CASES = {
    "Adam": Fit((2, 5)),
    "samples, ragged": Fit((4, 0, 2), weighting="samples", ragged=True),
    "accumulation, clipping": Fit((5, 2), accumulate=2, clip=0.1, scheduler="step"),
    "streams": Fit((1, 3, 3), iterable=True, optimizer="sgd"),
    "ZeRO": Fit((2, 4), optimizer="zero"),
    "unused": Fit((2, 4), model="unused", ddp={"find_unused_parameters": True}),
    "even": Fit((3, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_lightning(devices: Workers, name: str) -> None:
    case = CASES[name]
    assert_exact(case, devices.run(case.world_size, fit, case))


SCRIPTS: dict[str, Any] = {
    "DDP": Script(lengths=(2, 5)),
    "samples": Script(lengths=(4, 0, 2), weighting="samples"),
    "accumulation, clipping": Script(lengths=(5, 2), accumulate=2, clip=0.1),
    "a scaler": Script(lengths=(2, 4), scaler=8.0),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_accelerate(devices: Workers, name: str) -> None:
    script = SCRIPTS[name]
    results = devices.run(script.world_size, accelerate_front_end.train, script)
    expected = accelerate_front_end.expected_of(script, [result.seen for result in results])
    for result in results:
        assert difference(result.parameters, expected.parameters) < 1e-10
        assert all(map(torch.equal, result.parameters, results[0].parameters))
