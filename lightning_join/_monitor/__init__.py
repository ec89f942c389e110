"""`JoinMonitor`: how uneven the dataloaders are, and what that costs.

May import: `_compat`, `_packages`, `_joining`, `_callback`, for which it looks in a trainer.
Begin with: `monitor.py`.
"""
