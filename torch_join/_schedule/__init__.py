"""Who trains on which batch at which step, and how a batch gets there that is trained on by another rank.

Begin with: `active_ranks.py`, without rebalancing; `plan.py`, with it.
"""
