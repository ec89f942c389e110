"""Tests of `accelerate_join`."""
