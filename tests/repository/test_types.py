"""What an editor shows of the public functions, as mypy sees it."""

import re
import subprocess
import sys
from pathlib import Path

SNIPPET = """
from collections.abc import Iterable
import torch
from torch import Tensor
from torch.utils.data import DataLoader
import accelerate
from accelerate_join import Accelerator, join_batches, join_uneven_inputs
from torch_join import Join
from lightning_join import DDPJoinStrategy, JoinCallback

def look(tensors: Iterable[Tensor], pairs: DataLoader[tuple[Tensor, int]], own: list[dict[str, Tensor]]) -> None:
    with Join([torch.nn.Linear(1, 1)]) as join:
        reveal_type(join)
        for tensor in join.batches(tensors):
            reveal_type(tensor)
        for pair in join.batches(pairs):
            reveal_type(pair)
        for mine in join.batches(own):
            reveal_type(mine)
        for one, other in join.batches(zip(tensors, pairs)):
            reveal_type(one)
    accelerator = Accelerator()
    with accelerator.join_uneven_inputs() as joined:
        reveal_type(joined)
        for pair in joined.batches(pairs):
            reveal_type(pair)
    for pair in accelerator.join_batches(pairs):
        reveal_type(pair)
    stock = accelerate.Accelerator()
    with join_uneven_inputs(stock) as other_join:
        reveal_type(other_join)
    for tensor in join_batches(stock, tensors):
        reveal_type(tensor)
    Join([torch.nn.Linear(1, 1)], weighting="sample")
    accelerator.join_uneven_inputs(weighting="sample")
    join_uneven_inputs(stock, weighting="sample")
    DDPJoinStrategy(weighting="sample")
    JoinCallback(weighting="sample")
"""

REVEALED = [
    "torch_join.join.Join",
    "torch._tensor.Tensor",
    "tuple[torch._tensor.Tensor, int]",
    "dict[str, torch._tensor.Tensor]",
    "torch._tensor.Tensor",
    "torch_join.join.Join",
    "tuple[torch._tensor.Tensor, int]",
    "tuple[torch._tensor.Tensor, int]",
    "torch_join.join.Join",
    "torch._tensor.Tensor",
]


def test_types_are_those_of_the_batches(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml"]  # with the cache of scripts/check
    found = subprocess.run([*command, str(snippet)], cwd=root, capture_output=True, text=True, timeout=600)
    revealed = re.findall(r'Revealed type is "([^"]*)"', found.stdout)
    assert [kind.replace("builtins.", "") for kind in revealed] == REVEALED, found.stdout + found.stderr
    wrong = [line for line in found.stdout.splitlines() if "error" in line and "snippet.py" in line]
    assert len(wrong) == 5, found.stdout
    assert all("Literal['world', 'active', 'samples']" in line for line in wrong), found.stdout
