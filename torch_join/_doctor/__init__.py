"""What `python -m torch_join doctor` checks: begin with `run.py`, which has the checks in their order.

A check is a function that each rank calls, by a deadline, and one that judges on rank 0 what they have returned.
"""
