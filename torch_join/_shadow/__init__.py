"""What a joined rank runs in place of a model's step: DDP's own wrapper on a graph whose gradients are zero.

Begin with: `model_shadow.py`.
"""
