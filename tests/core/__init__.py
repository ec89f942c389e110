"""Tests of `torch_join`: a folder for each of its folders, and `loops` for whole plain loops.

`lockstep.py` is what `lightning_join` trains with, and is tested in `tests/lightning`.
"""
