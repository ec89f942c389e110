"""Tests of `torch_join/_participants`: models and their gradients, metrics, the public joinables, arguments."""
