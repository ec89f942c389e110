"""Copies replicated state from the rank that joined last to all others, and checks that it was replicated.

Start with `handover.py`. `audit.py` compares, by digests, values that should be equal on all ranks.
"""
