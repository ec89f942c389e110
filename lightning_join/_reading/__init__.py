"""Each rank's dataloaders: their number of batches, reading ahead, samplers, and the rank's position in them.

Nothing here meets the other ranks except `exchange` in `loaders.py`.
Start with `fetcher.py`, by which a rank knows one step ahead that its batches end.
"""
