"""Tests of `torch_join/_collectives`: each collective alone, beside a model, and in sub-groups."""
