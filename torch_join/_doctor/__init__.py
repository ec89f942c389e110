"""The checks of `python -m torch_join doctor`: start with `run.py`, which lists them in order.

A check has a function that each rank runs within a deadline, and one that judges the returned values on rank 0.
"""
