"""Loops that a framework drives: every rank runs every step, with a batch or without, and serves until the step's end.

Begin with: `base.py`, then `lockstep_join.py`.
"""
