"""Tests of `torch_join/_tail`.

Whole loops, of which the tail is a part, are in `tests/core/loops`.
"""
