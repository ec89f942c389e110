"""What training does besides the forward and backward of DDP, which `torch_join` has a joined rank follow.

Begin with: `manual.py`, manual optimization; the others are a page each: joinables, parameters that are unfrozen,
BatchNorm statistics, learning rates and their finder.
"""
