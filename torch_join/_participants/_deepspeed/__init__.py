"""DeepSpeed engines: a joined rank replays the engine's events, with zeros for gradients.

Imported only for an engine, by `_participants/make_participants.py` and `_lockstep/engine.py`.
Start reading at `events.py`, then `loop_engine.py`.
"""
