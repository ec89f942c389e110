"""Connections between the ranks: `links.py` carries bytes, `node.py` handles messages, `tree.py` waits for them."""
