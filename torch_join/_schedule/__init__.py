"""Which rank trains on which batch at which step, and how a batch reaches another rank that trains on it.

Begin with: `active_ranks.py`, without rebalancing; `plan.py`, with it.
"""
