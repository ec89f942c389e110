"""Tests of `torch_join/_control`: what ranks tell each other, and what they hear when one of them fails."""
