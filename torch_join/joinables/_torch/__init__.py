"""The public joinables, for torch's own `Join` too, which runs a step by hooks.

Begin with: `joinable.py`; `driver.py` is the driver under torch's `Join`.
"""
