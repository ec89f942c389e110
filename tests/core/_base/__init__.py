"""Tests of `torch_join/_base`."""
