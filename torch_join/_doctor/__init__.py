"""The checks of `python -m torch_join doctor`: start with `run.py`, which lists them in order.

A check is a function that each rank calls, with a deadline, and one on rank 0 that judges the returned values.
"""
