"""Where a rank's own code may go, and what happens where it cannot."""

import pytest

from torch_join._tail.life import PLACES, Place, move


def test_only_what_is_in_the_table_is_possible() -> None:
    for here in Place:
        for there in Place:
            if (here, there) in PLACES:
                assert move(here, there) is there
            else:
                with pytest.raises(RuntimeError, match=f"from '{here.value}' to '{there.value}'"):
                    move(here, there)
