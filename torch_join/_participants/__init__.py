"""Every mechanism is a participant: what an active rank announces and how a joined rank mirrors it.

One mechanism a file; none knows the loop that it takes part in but by the protocol `Driver` in `participant.py`.

Begin with: `participant.py`, then `ddp_model.py`. `_torch/` makes them usable in torch's own `Join`.
"""
