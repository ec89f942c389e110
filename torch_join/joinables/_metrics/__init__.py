"""Metrics whose state or result the ranks share.

May import: the wings above `joinables`, and `part.py`.
Begin with: `metric.py`.
"""
