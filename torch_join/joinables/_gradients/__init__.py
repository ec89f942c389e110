"""What has become of a model's gradients on one rank, as far as the other ranks must know it.

May import: the wings above `joinables`.
Begin with: `evidence.py`.
"""
