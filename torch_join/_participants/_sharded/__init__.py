"""Models that FSDP shards, and their optimizers: a joined rank owns a part of both, and follows the active ranks.

Imported only for a sharded model, by `_participants/make_participants.py` and `_lockstep/sharded.py`.
Start reading at `following.py`, then `sharded_model.py`.
"""
