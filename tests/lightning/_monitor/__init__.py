"""Tests of `lightning_join/_monitor`."""
