"""The parts of training besides DDP's forward and backward, which `torch_join` repeats on a joined rank.

Start with: `manual.py`, manual optimization; the others are a page each: joinables, parameters that are unfrozen,
BatchNorm statistics, learning rates and their finder.
"""
