"""A training in each front end, as users write it, whose places a script fills."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SequentialSampler

from tests.soak.hangs.script import EPOCHS, BadSampleError, Script
from torch_join import Join


def _optimizer(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), 0.1)


def plain(it: Script) -> None:
    _in_join(it, DistributedDataParallel(it.net))


def fsdp2(it: Script) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _in_join(it, fully_shard(it.net, mesh=init_device_mesh("cpu", (it.world_size,))))


def fsdp1(it: Script) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _in_join(it, FullyShardedDataParallel(it.net, device_id=torch.device("cpu"), use_orig_params=True))


def _epoch(it: Script, batches: Any, model: Any, backward: Any, optimizers: Sequence[Any], no_sync: Any) -> bool:
    """Go through a loop that the program writes; return whether the program returns inside of it."""
    for (x,) in batches:
        it.step += 1
        try:
            it.does("begin")
            if it.slips("continue"):
                continue
            with no_sync() if it.slips("no sync") else nullcontext():
                loss = it.loss(model(x))
                if it.slips("nan"):
                    continue
                it.does("between")
                backward(loss)
        except BadSampleError:
            continue
        it.does("optimizer")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        it.does("end")
        if it.slips("break"):
            break
        if it.slips("return"):
            return True
    return False


def _in_join(it: Script, model: Any) -> None:
    it.model = model
    given, backward = [model, _optimizer(model)], Tensor.backward
    if it.slip == "second model":
        second = DistributedDataParallel(nn.Linear(3, 1).double())
        given += [second, _optimizer(second)]

        def backward(loss: Tensor) -> None:
            loss.backward()
            if not it.hits:
                second(torch.ones(2, 3, dtype=torch.float64)).sum().backward()

    it.does("outside")
    with Join(given, **it.case.options) as join:
        it.does("before")
        for _ in it.epochs():
            if _epoch(it, join.batches(it.loader()), model, backward, given[1::2], lambda: model.no_sync()):
                return
        it.does("after")
    it.does("ended")


def fabric(it: Script) -> None:
    from lightning_join.fabric import DDPJoinStrategy
    from tests.support.front_ends.fabric import fabric_of

    it.does("outside")
    that = it.tools["fabric"] = fabric_of(it.world_size, DDPJoinStrategy(**it.case.options))
    it.model, optimizer = that.setup(it.net, _optimizer(it.net))
    loader: Any = that.setup_dataloaders(it.loader(), use_distributed_sampler=False)
    it.does("before")
    for _ in it.epochs():
        if _epoch(it, loader, it.model, that.backward, [optimizer], lambda: that.no_backward_sync(it.model)):
            return
    it.does("after")
    that.barrier()
    it.does("ended")


def accelerate(it: Script) -> None:
    from tests.support.front_ends.accelerate import accelerator_of

    with accelerator_of(it.rank) as that:
        it.tools["accelerator"] = that
        it.model, optimizer = that.prepare(it.net, _optimizer(it.net))
        it.does("outside")
        with that.join_uneven_inputs(**it.case.options) if it.case.context else nullcontext() as join:
            it.does("before")
            for _ in it.epochs():
                batches = join.batches(it.loader()) if join else that.join_batches(it.loader(), **it.case.options)
                if _epoch(it, batches, it.model, that.backward, [optimizer], lambda: that.no_sync(it.model)):
                    return
            it.does("after")
        that.end_training()
        it.does("ended")


def lightning(it: Script) -> None:
    _fit(it, by_hand=False)


def manual(it: Script) -> None:
    _fit(it, by_hand=True)


def _fit(it: Script, by_hand: bool) -> None:
    import lightning.pytorch as pl

    import lightning_join
    from tests.support.front_ends.lightning import Fit, build_trainer

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = it.net, not by_hand

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def train_dataloader(self) -> Any:
            return it.loader()

        def on_train_start(self) -> None:
            it.model = self.trainer.model
            it.does("before")

        def on_train_epoch_start(self) -> None:
            it.begin_epoch(self.current_epoch)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            it.step = batch_idx
            it.does("begin")
            if it.slips("continue"):
                return None
            loss = it.loss(self(batch[0]))
            if it.slips("nan"):
                return None
            it.does("between")
            if not by_hand:
                return loss
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            it.does("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            return None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if not by_hand:
                it.does("optimizer")

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            is_its = it.rank == it.case.who and (self.current_epoch, batch_idx) == (0, it.case.at)
            return -1 if it.slip == "break" and is_its else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            it.step = batch_idx
            it.does("end")

        def on_train_end(self) -> None:
            it.does("after")

        def configure_optimizers(self) -> Any:
            return _optimizer(self.net)

    it.does("outside")
    strategy = lightning_join.DDPJoinStrategy(**it.case.options)
    trainer = it.tools["trainer"] = build_trainer(Fit(it.case.lengths, epochs=EPOCHS), strategy=strategy)
    module = it.tools["module"] = Module()
    trainer.fit(module)
    it.does("ended")


def transformers(it: Script) -> None:
    from transformers import PretrainedConfig, TrainerCallback

    from accelerate_join.transformers import JoinTrainer
    from tests.support.front_ends.accelerate import accelerator_of
    from tests.support.front_ends.transformers import Fit, arguments_of

    class Net(nn.Module):
        accepts_loss_kwargs = False

        def __init__(self) -> None:
            super().__init__()
            self.net, self.config = it.net, PretrainedConfig()

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    class Trainer(JoinTrainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            if not model.training:
                return model(inputs["x"]).square().mean()
            it.does("begin")
            loss = it.loss(model(inputs["x"]))
            it.does("between")
            return loss

    class Places(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            it.model = trainer.model_wrapped
            it.does("before")

        def on_epoch_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            it.begin_epoch(it.epoch + 1)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            it.step += 1

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            it.does("optimizer")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            it.tools["control"] = control
            it.does("end")

        def on_train_end(self, *_: Any, **__: Any) -> None:
            it.does("after")

    optimizer = _optimizer(it.net)
    it.does("outside")
    with accelerator_of(it.rank), tempfile.TemporaryDirectory() as folder:
        trainer = it.tools["trainer"] = Trainer(
            model=Net(),
            args=arguments_of(Fit(it.case.lengths, EPOCHS), folder, max_grad_norm=0.0),
            train_dataset=it.rows(lambda row: {"x": row}),
            callbacks=[Places()],
            own_shards=True,
            **it.case.options,
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        )
        trainer.train()
    it.does("ended")


_ALL: tuple[Callable[[Script], None], ...] = (plain, fsdp1, fsdp2, fabric, accelerate, lightning, manual, transformers)
FRONT_ENDS = {each.__name__: each for each in _ALL}


def parameters(it: Script) -> Iterator[Tensor]:
    """Yield the parameters, whole; all ranks call this."""
    from tests.support.front_ends.sharded import full_state

    if it.case.front_end.startswith("fsdp"):
        yield from full_state(it.model).values()
    else:
        yield from (p.detach() for p in it.net.parameters())
