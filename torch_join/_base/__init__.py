"""What everything else stands on: errors, how gradients are weighted, what a tensor looks like.

Begin with: `weighting.py`, then `membership.py`: who is active, and what a rank does for the others.
"""
