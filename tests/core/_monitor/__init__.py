"""Tests of `torch_join/_monitor`."""
