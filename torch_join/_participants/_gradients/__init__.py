"""What has become of a model's gradients on one rank, as far as the other ranks must know it.

Begin with: `evidence.py`.
"""
