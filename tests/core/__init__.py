"""Tests of `torch_join`: a folder for each of its folders, and `loops` for whole plain loops.

`_lockstep` is what `lightning_join` trains with, and is mostly tested in `tests/lightning`.
"""
