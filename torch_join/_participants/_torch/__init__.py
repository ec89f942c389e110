"""The public joinables, which also work in torch's own `Join`, where hooks run a step.

Start reading at `public.py`; `joinable.py` has the driver under torch's `Join`.
"""
