"""One rank's part of an uneven training on several hosts; prints what the parameters are in the end, or the error."""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_join import Join, JoinError


def main(killed: int) -> None:
    """Train, rank 0 two steps and each further rank three more than the one before; `killed` ends in its last."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Linear(1, 1).double()
    model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.01)
    batches = [torch.full((2, 1), 1.0 + rank + step, dtype=torch.float64) for step in range(2 + 3 * rank)]
    begun = time.monotonic()
    try:
        with Join([model, optimizer]) as join:
            entered = time.monotonic() - begun
            for batch in join.batches(batches):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                if rank == killed and join.step == len(batches) - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    except JoinError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
        return
    parameters = [float(parameter.detach()) for parameter in net.parameters()]
    print(json.dumps({"parameters": parameters, "entered": entered}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
