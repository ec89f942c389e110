"""Tests of `torch_join/joinables`: models and their gradients, metrics, the public joinables, arguments."""
