"""Other collectives of a step: a tap on the `c10d` operators sees and describes them, joined ranks mirror them.

Begin with: `tap.py`, on an active rank; `neutral.py`, on a joined one. `subgroups.py`: collectives of some ranks only.
"""
