"""Whole plain loops under `Join`: exact, left early, entered twice, broken by a rank that fails."""
