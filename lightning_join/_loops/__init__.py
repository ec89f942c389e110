"""Lightning's loops, in which every rank runs every step, with a batch or without.

Begin with: `epoch.py`, whose `advance` is one training step; `takeover.py` is what puts these classes in the place of
Lightning's.
"""
