"""Collectives in every form, issued by active ranks alone and mirrored by a rank that has joined.

Each one of the table is in `test_join_collectives`, beside a model.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.core._collectives.forms import FORMS
from tests.needs import needs
from tests.support.collectives import DTYPES, check
from tests.support.inside import REFUSALS
from tests.support.party import Party
from tests.support.workers import Workers
from torch_join._base.errors import JoinError
from torch_join._collectives.neutral import ENTRIES, REDUCTIONS, mirror
from torch_join._collectives.tap import Call

# What is compiled calls the operators themselves.
TOLD = needs("operators that expose their reduce operation")


def _play_form(rank: int, joined: int, name: str) -> None:
    party = Party(rank, {joined})
    function, number = FORMS[name]
    for ranks in ((0, 1, 2), (0, 2)):
        case = party.case(ranks, default=len(ranks) == 3)
        results = party.play(lambda: function(case), ranks)  # noqa: B023
        if results is not None:
            check("AVG", results)
            assert len(party.calls) == number, party.calls


@pytest.mark.covering(1)
@pytest.mark.parametrize("joined", [0, 2])
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=TOLD) if form.startswith("compiled") else form for form in FORMS]
)
def test_collectives_are_seen_in_every_form(workers: Workers, form: str, joined: int) -> None:
    workers.run(3, _play_form, joined, form, store="tcp")


def test_a_collective_of_other_ranks_is_not_mirrored() -> None:
    mirror(Call("all_reduce", "a group of others", reduce_op="SUM"))
    with pytest.raises(JoinError, match="announced 'send', which finished ranks cannot take part in"):
        mirror(Call("send", "0"))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_neutral_values_are_of_the_dtype(dtype: torch.dtype) -> None:
    values = {r.op: r.value(dtype) for r in REDUCTIONS if dtype != torch.complex64 or r.op in ("SUM", "PRODUCT")}
    assert all(not torch.full((1,), value, dtype=dtype).to(torch.complex128).isnan().any() for value in values.values())


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def test_the_docs_show_the_table() -> None:
    text = (Path(__file__).parents[3] / "docs" / "collectives.md").read_text()
    operations = ((f"`{e.operation}`", e.contribution, e.result) for e in ENTRIES.values())
    assert _table(("operation", "a joined rank contributes", "active ranks get"), operations) in text
    reductions = ((f"`{r.op}`", r.contribution, r.result) for r in REDUCTIONS)
    assert _table(("reduce operation", "a joined rank contributes", "active ranks get"), reductions) in text
    assert _table(("what raises", "why", "use instead"), iter(REFUSALS)) in text
