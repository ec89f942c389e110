"""Collectives other than DDP's: a tap on the `c10d` operators describes them, and joined ranks mirror them.

Start with `tap.py` (active ranks) and `neutral.py` (joined ranks). `subgroups.py`: collectives of some ranks only.
"""
