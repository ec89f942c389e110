"""Loops that a framework drives: every rank runs every step, with or without a batch, and serves to the step's end.

Begin with: `base.py`, then `lockstep_join.py`.
"""
