"""Which rank trains on which batch at which step, and how a batch reaches another rank that trains on it.

Start reading at `active_ranks.py` for loops without rebalancing, at `plan.py` for loops with it.
"""
