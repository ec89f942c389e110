"""The foundations of all other packages: errors, the weighting of gradients, descriptions of tensors.

Start with `weighting.py`, then `membership.py`: which ranks are active, and a rank's role for the others.
"""
