"""Lightning's loops, in which every rank runs every step, with a batch or without.

Start with `epoch.py`, whose `advance` is one training step; `takeover.py` replaces Lightning's classes by these.
"""
