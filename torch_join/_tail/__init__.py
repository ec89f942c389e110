"""Who is active at which step, and what happens from the first rank that joins to the last.

Begin with: `loop.py`, then `tail_log.py`.
"""
