"""Connections between the ranks: `links.py` carries bytes, `node.py` has what they mean, `tree.py` waits for them."""
