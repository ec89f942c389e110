"""What has happened to a model's gradients on one rank, as far as other ranks must know it.

Begin with: `evidence.py`.
"""
