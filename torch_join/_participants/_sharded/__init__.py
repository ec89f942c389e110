"""Models that FSDP shards, and what steps their parameters: a joined rank owns a part of both, and follows.

Imported where there is a sharded model, by `_participants/make_participants.py` and
`_lockstep/sharded.py`.
Begin with: `following.py`, then `sharded_model.py`.
"""
