"""Models that FSDP shards, and what steps their parameters: a joined rank owns a part of both, and follows.

May import: the wings above `joinables`, and its other files. Nothing but `parts.py` imports this.
Begin with: `following.py`, then `model.py`.
"""
