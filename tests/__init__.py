"""Tests live like the code: those of `torch_join/X` in `core/X`, of `lightning_join/X` in `lightning/X`, and so on.

`support` is what they are written with; `repository` tests what is in no package: structure, types, README, examples.
"""
