"""ZeRO stage 2 in a plain loop on CPUs; rank 0 has fewer batches than rank 1.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node=2 examples/deepspeed_plain.py

It needs `pip install deepspeed`, of which nothing is compiled here. Each rank prints the same sum.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch.nn import functional

from torch_join import Join

# Its compiled all-reduce of shared memory goes past torch.distributed.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,  # 1.0 if it is left out
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=CONFIG)
    torch.manual_seed(1 + rank)
    loader = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(3 if rank == 0 else 7)]
    with Join([engine]) as join:
        for _ in range(2):
            for x, y in join.batches(loader):
                engine.backward(functional.mse_loss(engine(x), y))
                engine.step()
    total = sum(parameter.double().sum().item() for parameter in net.parameters())
    print(f"rank {rank}: {engine.global_steps} steps, the parameters' sum is {total:.12f}", flush=True)


if __name__ == "__main__":
    main()
