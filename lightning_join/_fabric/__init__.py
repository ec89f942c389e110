"""Fabric's side of this package, but for its strategies, which are in `fabric.py` beside this folder.

Begin with: `joins.py`.
"""
