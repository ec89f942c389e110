"""Predictions in the dataset's order: gathered from all ranks, or written to a file.

Begin with: `gather.py`, and `order.py`, which finds out what the order is.
"""
