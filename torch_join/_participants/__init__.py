"""Every mechanism is a participant: it announces on an active rank, and mirrors on a joined rank.

One mechanism per file; a participant knows its loop only by the protocol `Driver` in `participant.py`.

Start reading at `participant.py`, then `ddp_model.py`. `_torch/` makes participants usable in torch's own `Join`.
"""
