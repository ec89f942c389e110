"""Predictions in the dataset's order: gathered from all ranks, or written to a file.

Start with: `gather.py`, and `order.py`, which determines the order.
"""
