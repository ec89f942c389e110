"""DeepSpeed engines: a joined rank replays the engine's events, with zeros for gradients.

Nothing but `parts.py` imports this.
Begin with: `events.py`, then `loop.py`.
"""
