"""A mode of torch's that passes all functions on."""

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class Mode(TorchFunctionMode):
    """Passes all on, by a function of its own."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.passed_on(function, args, kwargs or {})

    def passed_on(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)
