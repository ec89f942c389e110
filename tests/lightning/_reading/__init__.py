"""Tests of `lightning_join/_reading`: samplers, and dataloaders that have a state."""
