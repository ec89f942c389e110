"""Accelerate on uneven dataloaders: not written yet, see the README's table of what works."""

__version__ = "0.1.0"

__all__: list[str] = []
