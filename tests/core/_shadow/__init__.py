"""Tests of `torch_join/_shadow`.

DDP's options, buffers and unusual parameters are in `tests/lightning/_training/test_models.py`, which trains with them.
"""
