"""Two processes train one model, one on 5 batches and one on 2: `torchrun --nproc-per-node 2 quickstart.py`."""

import copy

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from torch_join import Join

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)  # both processes make the same model, and know both shards
shards = [[(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(length)] for length in (5, 2)]
model = torch.nn.Linear(3, 1)
alone = copy.deepcopy(model)

ddp = DistributedDataParallel(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
with Join([ddp, optimizer], weighting="samples") as join:
    for x, y in join.batches(shards[rank]):
        print(f"Rank {rank}, step {join.step}: ranks {list(join.active_ranks)} have a batch")
        optimizer.zero_grad()
        mse_loss(ddp(x), y).backward()
        optimizer.step()
print(f"Rank {rank} is done. Its weights: {model.weight.detach().numpy().round(4)}")

# One process computes the same, if each of its batches has the samples of both ranks in that step.
optimizer = torch.optim.Adam(alone.parameters(), lr=0.1)
for step in range(5):
    batches = [shard[step] for shard in shards if step < len(shard)]
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    optimizer.zero_grad()
    mse_loss(alone(x), y).backward()
    optimizer.step()
difference = (alone.weight - model.weight).abs().max().item()
print(f"Rank {rank}: the largest difference from one process is {difference:.0e}")
dist.destroy_process_group()
