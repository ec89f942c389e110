"""Models that FSDP shards, and the optimizers of their parameters: a joined rank owns a part of both, and follows.

Imported only for a sharded model, by `_participants/make_participants.py` and `_lockstep/sharded.py`.
Begin with: `following.py`, then `sharded_model.py`.
"""
