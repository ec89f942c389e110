"""A channel over connections between the ranks: `links.py` carries bytes, `tree.py` what they mean."""
