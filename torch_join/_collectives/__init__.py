"""Other collectives of a step: seen by a tap on the `c10d` operators, described, and mirrored with neutral values.

Begin with: `tap.py`, on an active rank; `neutral.py`, on a joined one. `subgroups.py`: collectives of some ranks only.
"""
