"""A joined rank's replacement for a model's step: DDP's own wrapper around a graph with zero gradients.

Start with `model_shadow.py`.
"""
