"""The parts of training besides DDP's forward and backward, which `torch_join` repeats on a joined rank.

Start with `manual.py` (manual optimization). The other modules are a page each: joinables, what the ranks must train
alike, and the learning rate finder.
"""
