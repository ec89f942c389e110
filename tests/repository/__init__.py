"""Tests of the repository as a whole: the packages' names, imports and structure, types, README, examples."""
