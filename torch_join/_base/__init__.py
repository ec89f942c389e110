"""The foundations of all other packages: errors, the weighting of gradients, descriptions of tensors.

Begin with: `weighting.py`, then `membership.py`: who is active, and a rank's role for the others.
"""
