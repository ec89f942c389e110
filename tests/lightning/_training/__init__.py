"""Tests of `lightning_join/_training`, and of what DDP and collectives do in `training_step`."""
