"""Tests of `lightning_join/_logging`."""
