"""Finds out how user code has changed a model's gradients on one rank, for the other ranks.

Start reading at `evidence.py`.
"""
