"""What has a stream wait where autograd does not; what it does on a device: `tests/device`."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from torch_join._shadow.model_shadow import accumulators, streams_waiting


def test_an_interruption_leaves_no_hook() -> None:
    handle, variable = mock.Mock(), torch.ones(1)
    first: Any = SimpleNamespace(variable=variable, register_prehook=lambda hook: handle)
    second: Any = SimpleNamespace(variable=variable, register_prehook=mock.Mock(side_effect=KeyboardInterrupt))
    with (
        mock.patch("torch.accelerator.current_stream"),
        pytest.raises(KeyboardInterrupt),
        streams_waiting([first, second]),
    ):
        pass
    handle.remove.assert_called_once_with()


def test_a_frozen_parameter_stays_so() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    nodes = accumulators([*model.parameters()])
    assert all(node.variable is parameter for node, parameter in zip(nodes, model.parameters(), strict=True))
    assert [p.requires_grad for p in model.parameters()] == [True, False]
