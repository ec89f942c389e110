"""Reading tensors of several kinds at once."""

import torch

from torch_join._base.devices import device_of, on_device, read


def test_read_returns_the_elements_of_each_in_their_places() -> None:
    tensors = [
        torch.tensor([True, False]),
        torch.tensor(2.5, dtype=torch.float64),
        torch.zeros(0, dtype=torch.int64),
        torch.tensor([[1, 2], [3, 2**62 + 1]]),
        torch.tensor(-1.0, dtype=torch.float64),
        torch.tensor([False]),
    ]
    assert read(tensors) == [[True, False], [2.5], [], [1, 2, 3, 2**62 + 1], [-1.0], [False]]
    assert read([]) == []


def test_without_a_process_group_there_is_no_device_of_one() -> None:
    assert device_of(None) == torch.device("cpu")
    with on_device(None):
        assert torch.zeros(1).device.type == "cpu"
