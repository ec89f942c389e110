"""Train a recommender whose embeddings TorchRec has sharded over two processes with different numbers of batches.

    pip install --no-deps torchrec==1.8.* fbgemm-gpu-cpu==1.8.* torchmetrics==1.0.3 tensordict pyvers pyre-extensions \
        iopath typing_inspect mypy_extensions cloudpickle importlib_metadata orjson portalocker zipp
    python examples/recommender.py

A rank that has run out of batches holds tables that the others' samples look up. So it runs the step itself, on a batch
without samples. Ends with the largest difference of the parameters from those of one process on the same schedule.
"""

import gc
import sys
import tempfile
from typing import Any

import fbgemm_gpu  # noqa: F401  registers what embeddings run on
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints

from torch_join import Join

LENGTHS = (2, 5)
FEATURES = ["films", "users"]
ROWS, WIDTH, RATE = 8, 4, 0.5
TOLERANCE = 1e-6  # TorchRec trains in float32
Batch = tuple[KeyedJaggedTensor, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[name])
            for name in FEATURES
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.head = nn.Linear(len(FEATURES) * WIDTH, 1)

    def forward(self, looked_up: KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.embeddings(looked_up).values()))
        return out


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def batch_of(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * rank + step)
    count = 2 + (rank + step) % 2
    lengths = torch.randint(0, 3, (len(FEATURES) * count,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(FEATURES, values, lengths=lengths), torch.randn(count, 1, generator=generator)


def without_samples(_: Batch) -> Batch:
    nothing = torch.empty(0, dtype=torch.long)
    return KeyedJaggedTensor(FEATURES, nothing, lengths=nothing), torch.empty(0, 1)


def count(batch: Batch) -> int:
    return len(batch[1])


def shard(net: Net) -> DistributedModelParallel:
    sharder: Any = EmbeddingBagCollectionSharder({"learning_rate": RATE, "optimizer": EmbOptimType.EXACT_SGD})
    constraints = {name: ParameterConstraints(["table_wise"], ["fused"]) for name in FEATURES}
    planner = EmbeddingShardingPlanner(Topology(dist.get_world_size(), "cpu"), constraints=constraints)
    plan = planner.collective_plan(net, [sharder], dist.group.WORLD)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    model = DistributedModelParallel(net, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if hasattr(value, "local_shards"):
                for each in value.local_shards():
                    each.tensor.copy_(start[name])  # a table is on one rank, whole
            else:
                value.copy_(start[name])
    return model


def train(model: DistributedModelParallel, rank: int) -> None:
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "head" in name], lr=RATE)
    batches = [batch_of(rank, step) for step in range(LENGTHS[rank])]
    with Join([model, optimizer], weighting=count, placeholder=without_samples) as join:
        for looked_up, ratings in join.batches(batches):
            optimizer.zero_grad()
            mse_loss(model(looked_up), ratings).backward()  # in which the tables take their step
            optimizer.step()


def train_in_one_process(net: Net) -> None:
    """Do what the ranks do together: each step is the mean over the samples of all batches that there are."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for step in range(max(LENGTHS)):
        batches = [batch_of(rank, step) for rank, length in enumerate(LENGTHS) if step < length]
        everything = sum(map(count, batches))
        optimizer.zero_grad()
        for each in batches:
            (mse_loss(net(each[0]), each[1]) * count(each) / everything).backward()
        optimizer.step()


def work(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=len(LENGTHS))
    reference = network()
    train_in_one_process(reference)
    model = shard(network())
    train(model, rank)
    expected, worst = reference.state_dict(), torch.zeros(())
    for name, value in model.state_dict().items():
        parts = [each.tensor for each in value.local_shards()] if hasattr(value, "local_shards") else [value]
        worst = torch.stack([worst, *((part - expected[name]).abs().max() for part in parts)]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    if rank == 0:
        print(f"Largest difference of a parameter from one process on the same schedule: {worst.item():.1e}")
    if not worst <= TOLERANCE:  # NaN neither
        sys.exit(f"The parameters differ from those of one process by more than {TOLERANCE:.0e}.")


def main() -> None:
    print("Batches:", ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(LENGTHS)))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(f"file://{folder}/rendezvous",), nprocs=len(LENGTHS))


if __name__ == "__main__":
    main()
