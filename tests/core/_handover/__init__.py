"""Tests of `torch_join/_handover`: what is handed over, what is found to differ, and what a `break` leaves to it."""
