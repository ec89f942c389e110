"""The Fabric part of this package, except for the strategies, which are in `fabric.py` next to this folder.

Start reading at `joins.py`.
"""
