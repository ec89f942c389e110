"""`JoinMonitor`: what uneven inputs cost, measured and shown, the same for all front ends.

Begin with: `monitor.py`.
"""
