"""`self.log` on ranks with different numbers of batches: every rank gets the same values.

Start with: `results.py` for an epoch's values; `step_values.py` for those of a step without a batch on some ranks.
"""
