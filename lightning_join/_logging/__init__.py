"""`self.log` on ranks with different numbers of batches: every rank gets the same values.

Begin with: `results.py` for the values of an epoch; `step_values.py` for those of a step that some ranks do not have.
"""
