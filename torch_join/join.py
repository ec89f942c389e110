"""`Join`: torch's context for uneven inputs, made exact. Its driver in `_tail/loop.py` does the work."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, overload

from torch import Tensor
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.utils.data import DataLoader

from torch_join._base.weighting import Weighting
from torch_join._collectives.gather_active import gather_active
from torch_join._control.rendezvous import open_channel
from torch_join._handover.audit import Often
from torch_join._monitor.monitor import JoinMonitor
from torch_join._participants._torch.joinable import unwrap
from torch_join._participants.arguments import check_given, check_options, common_group, listed
from torch_join._participants.options import Options, by_old_name, renamed
from torch_join._schedule.placeholders import Placeholder
from torch_join._tail.alone import AloneDriver
from torch_join._tail.loop import LoopDriver
from torch_join.gather_in_order import gather_given

J = TypeVar("J", bound="Join")
T = TypeVar("T")


class Join(TorchJoin):
    """Train on uneven inputs in a plain loop, exactly.

    ```python
    with Join([ddp, optimizer, scheduler]) as join:
        for batch in join.batches(loader):
            ...
    ```

    A rank that has run out of inputs (a finished rank) keeps taking part in the collectives of the other ranks, with
    zeros in a gradient all-reduce and a neutral value in any other collective. When the last rank finishes, the others
    copy the state of its joinables, and all ranks leave the loop together. A plain `for` over the loader works too:
    ranks then meet at each forward of a model.

    Args:
        joinables: DDP models, optimizers, LR schedulers, `GradScaler`s, torch `Joinable`s, and objects with
            `state_dict` and `load_state_dict`. Pass the same list, in the same order, on every rank.
        enable: `False` disables the context: `batches` yields the loader's batches, and every rank is active.
        throw_on_early_termination: Whether to raise on all ranks when one of them runs out of inputs before others.
        weighting: How to combine the gradients of the active ranks. `"world"` (the default) divides their sum by the
            number of ranks; `"active"` takes their mean; `"samples"` weights them by batch size. A function takes a
            batch from the loader and returns its weight, such as a token count.
        may_break: Whether ranks may `break` out of their loops at different steps. They then meet in each step, even if
            lengths are certain.
        timeout: How long a rank waits for another rank, by default 30 minutes.
        audit: When to compare the ranks' states: `"tail"`: in loops that a rank finishes early. `True`: in all loops.
        hand_over_ignored: Whether to hand over parameters that DDP ignores. `None`: only those that are bitwise equal
            on all ranks.
        hand_over_buffers: Whether to hand over FSDP buffers and buffers that DDP does not broadcast. `None`: only in
            modules whose buffers were bitwise equal on all ranks after each rank had trained.
        backward_collectives: Whether a backward may run collectives even if no autograd function ran one in the
            forward. If one did (SyncBatchNorm, `torch.distributed.nn.functional`), this is detected.
        rebalance: Whether finished ranks receive batches from other ranks, so that all ranks train until the end. Loop
            over `batches`, and leave each loop at the same step on all ranks.
        placeholder: The batch on which a finished rank runs the remaining steps itself, for models that span several
            ranks (experts, pipelines). The loss of such a step has zero weight. `"last"`: the rank's last batch.
            `"rows"`: that batch without samples (`tensor[:0]`). A function: its return value for that batch. A rank
            that never had a batch uses another rank's. Nothing is mirrored or handed over.
        monitor: A `JoinMonitor`, which measures each loop over `batches` and the cost of its uneven inputs.
        **hooks: Passed to every `join_hook`. `divide_by_initial_world_size` selects a weighting, as in torch.

    Raises:
        JoinValueError: `joinables` is empty or mixes process groups, or `monitor` is combined with `enable=False` on
            several ranks.
        JoinTypeError: A joinable has an unsupported type, or `Join` and all hooks lack an argument that was passed.
        EarlyTerminationError: See `throw_on_early_termination`.
    """

    @renamed
    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        weighting: Weighting = Options.weighting,
        may_break: bool = False,
        timeout: timedelta = Options.timeout,
        audit: Often = "tail",
        hand_over_ignored: bool | None = None,
        hand_over_buffers: bool | None = None,
        backward_collectives: bool = False,
        rebalance: bool = False,
        placeholder: Placeholder | None = None,
        monitor: JoinMonitor | None = None,
        **hooks: Any,
    ) -> None:
        self._use(joinables, Options.of(locals()))

    def _use(self, joinables: Sequence[Any], options: Options) -> None:
        given = listed(joinables)
        things = [unwrap(thing) for thing in given]
        check_given(things)
        check_options(options.hooks, things)
        self._driver = (LoopDriver if options.enable else AloneDriver)(things, options, common_group(given))

    def __enter__(self: J) -> J:
        self._driver.enter(lambda: open_channel(self._driver.members.group, self._driver.options.timeout))
        return self

    def __exit__(
        self,
        type: type[BaseException] | None,  # noqa: A002  torch's name
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._driver.finish(value)
        except BaseException as error:
            if error is not value:
                raise
        finally:
            self._driver.leave()

    # A DataLoader's own iterator yields `Any`.
    @overload
    def batches(
        self, loader: DataLoader[T], *, name: str = "", placeholder: Placeholder | None = None
    ) -> Iterable[T]: ...
    @overload
    def batches(
        self, loader: Iterable[T], *, name: str = "", placeholder: Placeholder | None = None
    ) -> Iterable[T]: ...
    def batches(self, loader: Iterable[T], *, name: str = "", placeholder: Placeholder | None = None) -> Iterable[T]:
        """Iterate over the batches of `loader`; all ranks leave the loop together, in the same state.

        If all lengths are certain (a list, or a `DataLoader` with a torch sampler), the ranks exchange them once, and
        steps cost nothing extra. Otherwise the ranks meet at each batch.

        Args:
            loader: This rank's batches; may be empty.
            name: The loop's name, if an epoch has several loops: `state_dict` has a place for each name.
            placeholder: Overrides `Join`'s `placeholder` in this loop.

        Returns:
            An iterable over this rank's batches, for one loop. With a placeholder, it has as many as the rank with the
            most. It is not an iterator: a progress bar that holds it does not keep a loop open after a `break`.
        """
        return self._driver.batches(loader, name, placeholder)

    def state_dict(self) -> dict[str, Any]:
        """Return every rank's position in its data, from which another job can resume the current or last loop.

        ```python
        for batch in join.batches(loader):
            ...
            if join.step % 1000 == 0:
                position = join.state_dict()
                if join.active_ranks[0] == rank:
                    torch.save({"model": ddp.module.state_dict(), "join": position}, path)
        ```

        Call it on all active ranks at the same step; finished ranks add their position without a call. The current
        batch counts as trained on. From a state saved after the loop, the next loop starts at its first batch; from one
        saved after a `break`, this loop resumes. If an epoch has several loops, give each a name.

        Returns:
            The same state on all ranks: numbers, strings, tensors, and the states of loaders that have a `state_dict`.

        Raises:
            JoinError: Some ranks did not call it, or called it at another step.
            JoinTypeError: A loader's state cannot be pickled.
            UnsupportedError: The order of the data is seeded by the clock, so it cannot be reproduced.
        """
        return self._driver.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next loop over `batches` where `state_dict` was called; all ranks call this.

        If loops have names, the next loop with the saved name resumes; loops with other names before it are empty,
        because the saved epoch had finished them. Later loops have the data order of an uninterrupted run.

        A loader with a `load_state_dict` restores its own state. Any other loader must yield the same batches again.
        Skips batches that have been trained on; if a sampler picks them, they are not even read. To repeat the order,
        this method restores the random generators behind it, and calls `set_epoch` on samplers that have it.

        Args:
            state: The return value of `state_dict`.

        Raises:
            JoinValueError: A different number of ranks wrote the state in the middle of a loop. Also raised as the
                loop starts, if its loader is not the saved one or only some ranks have loaded the state.
            JoinError: A loop is running.
        """
        self._driver.load_state_dict(state)

    def stop_requested(self) -> bool:
        """Return whether any rank has received SIGTERM or SIGUSR1; all ranks get `True` in the same step.

        ```python
        for epoch in range(first_epoch, epochs):
            for batch in join.batches(loader):
                ...
                if join.stop_requested():
                    break
            if join.stop_requested():  # on all ranks, including those that have run out of batches
                position = join.state_dict()
                if rank == 0:
                    torch.save({"model": ddp.module.state_dict(), "join": position, "epoch": epoch}, path)
                break
        ```

        In a loop, call it on all active ranks at the same step; finished ranks take part without a call. After the loop
        it returns the loop's result again, without communication. If no loop calls it, call it on all ranks between
        loops.

        Each call in a loop takes a round trip between the ranks; if that is too slow, call it every few steps. Loops
        that do not call it pay nothing. Once it has returned `True`, it always returns `True`.

        From the first call in the main thread until the end of the `with`, these signals no longer end any rank's
        process. Calls in other threads do not change that. Your own handlers are called too.

        Raises:
            JoinError: The loop is a plain `for`, or only some ranks call it.
            JoinValueError: `enable=False`, so the ranks do not communicate.
        """
        return self._driver.stop_requested()

    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from each active rank, for a loss over all of them; all active ranks call this in a step.

        Args:
            tensor: This rank's tensor, of the same shape and type on each rank.
            sync_grads: Whether gradients flow through the gather, so that each rank gets gradients from all active
                ranks' losses. Each of these losses must then depend on the result.

        Returns:
            The tensors, stacked in the order of `active_ranks`; this rank's tensor is at `active_ranks.index(rank)`.
        """
        active, members = self._driver.find_active(), self._driver.members
        if (placeholders := self._driver.placeholders) is not None:
            tensor = placeholders.shaped(tensor)
        return gather_active(tensor, active, members.group if members.world_size > 1 else None, sync_grads)

    def weigh(self, value: Tensor) -> Tensor:
        """Multiply a value by the weight of this rank's loss in the current step, in a loop with a placeholder.

        Use the result for decisions that all ranks make together. Its mean over all ranks is the weighted mean loss;
        on a finished rank it is zero. Losses whose `backward` is called are weighted without this.

        Args:
            value: A tensor of any shape without grad: a detached loss, or `grad_outputs` of `autograd.grad`.

        Raises:
            JoinError: The value requires grad, or the loop has no placeholder.
        """
        return self._driver.weigh(value)

    def gather_in_order(self, rows: Any, indices: Any = None, rank: int | None = None) -> Any:
        """Return all ranks' results for their samples, in order; all ranks call it, after a loop.

        ```python
        rows, indices = [], []
        for batch in join.batches(loader):
            rows.append({"logits": model(batch["x"]), "names": batch["names"]})
            indices.append(batch["index"])
        everything = join.gather_in_order(rows, indices)
        ```

        With indices, rows are sorted by index, and each index occurs once: the first row of the lowest rank that has
        it. (A sampler that pads, such as torch's `DistributedSampler`, gives some samples to two ranks.) The indices
        must belong to one dataset that all ranks share. Without indices, rows are sorted by rank, then by batch.

        Args:
            rows: This rank's results: a list with one structure per batch, or a single structure. A structure is a
                tensor with one row per sample, a list with one object per sample, or a tuple or mapping of structures.
                On a rank without a batch, pass `None` or an empty list.
            indices: The samples' indices: a sequence or tensor for each structure, in a list if `rows` is a list.
            rank: The rank that gets the result; by default all do.

        Returns:
            One structure of all samples: tensors and lists concatenated, mappings as dictionaries. `None` on ranks
            other than `rank`, and on all ranks if no rank has a batch.

        Raises:
            JoinValueError: On all ranks, if a rank's rows cannot be gathered. The message names the rank and the part.
            JoinError: Some ranks have run out of batches, and others have not.
        """
        self._driver.check_together("join.gather_in_order")
        if indices is None:
            self._driver.check_rows(rows)
        members = self._driver.members
        return gather_given(rows, indices, members.group, rank)

    gather = by_old_name("gather", gather_in_order)

    @property
    def backward_collectives(self) -> bool:
        """Whether finished ranks follow each backward pass piece by piece; must be the same on all ranks."""
        return self._driver.backward_collectives

    @backward_collectives.setter
    def backward_collectives(self, always: bool) -> None:
        self._driver.backward_collectives = always

    @property
    def joined(self) -> bool:
        """Whether this rank has run out of inputs."""
        return self._driver.members.rank not in self._driver.find_active()

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """The ranks that have an input at the current step."""
        return self._driver.find_active()

    @property
    def batch_owner(self) -> int | None:
        """The rank whose batch this rank trains on in the current step: with `rebalance`, possibly another rank."""
        share = self._driver.share
        return None if share is None else share.owner

    @property
    def owner_batch_idx(self) -> int | None:
        """The current batch's index among the batches of `batch_owner` in this loop; `step` without `rebalance`."""
        share = self._driver.share
        return None if share is None else share.batch_idx

    @property
    def step(self) -> int:
        """The current step, counted from the start of the loop, even if an earlier job started it."""
        return self._driver.step_number
