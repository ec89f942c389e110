"""What everything else stands on: errors, how gradients are weighted, what a tensor looks like, compat of torch.

May import: nothing else of this package.
Begin with: `weighting.py`, then `driver.py`, which says what a part may ask of the loop that it takes part in.
"""
