"""The public joinables, for torch's own `Join` too, which runs a step by hooks.

Begin with: `public.py`; `joinable.py` has the driver under torch's `Join`.
"""
