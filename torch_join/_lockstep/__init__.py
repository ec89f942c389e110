"""Loops that a framework drives: every rank runs every step, and serves until its end if it has no batch.

Start with `base.py`, then `lockstep_join.py`.
"""
