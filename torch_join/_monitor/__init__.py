"""`JoinMonitor` measures and shows the cost of uneven inputs, in the same way for all front ends.

Start with `monitor.py`.
"""
