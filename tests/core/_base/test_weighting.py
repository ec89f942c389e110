"""The factors of the three weightings."""

from torch_join._base.weighting import loss_factor


def test_loss_factors() -> None:
    assert loss_factor("world", 4, 2, 3, 9) == 1.0
    assert loss_factor("active", 4, 2, 3, 9) == 2.0
    assert loss_factor("samples", 4, 2, 3, 9) == 4 * 3 / 9
    assert loss_factor(len, 4, 2, 1.5, 4.5) == 4 * 1.5 / 4.5
    assert loss_factor("samples", 4, 2, 0, 0) == 0.0  # where nobody has anything, there is nothing to learn
