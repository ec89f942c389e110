"""Metrics whose state or result the ranks share.

Start reading at `metric.py`.
"""
