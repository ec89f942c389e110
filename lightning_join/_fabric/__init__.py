"""Fabric's side of this package, but for its strategies, which are in `fabric.py` beside this folder.

May import: `_collectives`, `_reading`.
Begin with: `joins.py`.
"""
