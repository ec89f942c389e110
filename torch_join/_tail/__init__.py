"""Which ranks are active at each step, and the tail: from the first rank that joins to the last.

Start reading at `loop.py`, then `tail_log.py`.
"""
