"""Tests of `lightning_join`: a folder for each of its folders, and here what concerns the strategy as a whole."""
