"""Each rank's own dataloaders: how many batches they have, reading ahead, samplers, and where a rank is in them.

Nothing here meets the other ranks but `exchange` in `loaders.py`.
Begin with: `fetcher.py`, with which a rank knows one step ahead that its batches end.
"""
