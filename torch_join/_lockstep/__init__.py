"""Loops that a framework drives: every rank runs every step, with a batch or without, and serves until the step's end.

May import: `_base`, `_control`, `_schedule`, `_shadow`, `_collectives`, `_handover`, `joinables`, `_tail`.
Begin with: `base.py`, then `ddp.py`.
"""
