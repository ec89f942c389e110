"""`self.log` on ranks with different numbers of batches: every rank gets the same values.

Start with `results.py`, for the values of an epoch. `step_values.py` is for the values of a step in the tail.
"""
