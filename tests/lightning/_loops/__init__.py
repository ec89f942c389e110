"""Tests of `lightning_join/_loops`: who ends what, hooks, evaluation, checkpoints, and steps without a loss."""
