"""Metrics whose state or result the ranks share.

Begin with: `metric.py`.
"""
