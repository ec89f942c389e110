"""A joined rank's replacement for a sharded model's step: it follows gathers and reductions, and computes nothing.

Start with `unit.py`, then `fsdp2.py` (`fully_shard`) and `fsdp1.py` (`FullyShardedDataParallel`).
"""
