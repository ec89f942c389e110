"""Small models, and states to be compared."""

from typing import Any

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def freeze(value: Any) -> Any:
    """Make `value` comparable, tensors by their bits."""
    if isinstance(value, Tensor):
        bits = value.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()
        return str(value.dtype), tuple(value.shape), value.device.type, bits
    if isinstance(value, dict):
        return {key: freeze(item) for key, item in sorted(value.items(), key=lambda pair: repr(pair[0]))}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [freeze(item) for item in value]
    return repr(value)


class Holder:
    """Something with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {} if self.value == () else {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
