"""Models that FSDP shards, and what steps their parameters: a joined rank owns a part of both, and follows.

Nothing but `parts.py` imports this.
Begin with: `following.py`, then `model.py`.
"""
