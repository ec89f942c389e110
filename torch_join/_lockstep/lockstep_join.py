"""Join for a DDP model in a loop that a framework drives."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from torch_join._base.attributes import setting
from torch_join._base.errors import JoinError, UnsupportedError
from torch_join._compat import ddp as _compat
from torch_join._compat import groups as _compat_groups
from torch_join._compat.modules import weight_hooks
from torch_join._compat.optimizer_state import is_sharded
from torch_join._handover.mirror import is_known, known
from torch_join._lockstep.base import Lockstep
from torch_join._lockstep.step_driver import StepDriver
from torch_join._participants._gradients.pieces import FIRED, Pieces
from torch_join._participants._gradients.watch import Watch, leaving_out
from torch_join._participants.kinds import unsynced_models
from torch_join._participants.participant import Driver, Participant
from torch_join._shadow.buffer_news import Buffer, take
from torch_join._shadow.model_shadow import ModelShadow
from torch_join._shadow.synced_norms import has_synced_norms
from torch_join._shadow.zero_gradient import following_zero, own_first

_GRADIENTS = 1 << 32  # one addition counts the ranks without a loss, and those among them without gradients


class LockstepModelParticipant(Participant):
    """A `DistributedDataParallel` model whose steps all ranks run.

    Every rank knows from the meeting before a step that it has a forward and a backward, so these are not announced.

    Attributes:
        shadow: Runs in place of the model's step.
        has_news: Whether this step has changed the form of buffers, whose contents joined ranks lack.
        has_frozen: Whether this step has frozen or unfrozen parameters, on a joined rank.
    """

    kinds: ClassVar[dict[str, Any]] = {
        **Pieces.kinds,
        "buffers": list[Buffer],
        "given": list[Buffer] | None,
        "frozen": list[int],
    }
    in_pieces = True

    def __init__(self, driver: Driver, index: int, shadow: ModelShadow) -> None:
        super().__init__(driver, index)
        self.use(shadow)
        self.has_news = self.has_frozen = False

    def use(self, shadow: ModelShadow) -> None:
        """Use another shadow."""
        self.shadow = shadow
        self._pieces = Pieces(self, shadow)

    @property
    def owned(self) -> list[str]:
        return _compat.ignored_and_trained(self.shadow.ddp)

    def exit(self) -> None:
        super().exit()
        self._pieces.reset()

    @contextmanager
    def telling_changes(self) -> Iterator[None]:
        """Wrap an active rank's forward, and announce its changes to joined ranks.

        These are changes to buffers that DDP broadcasts, and the parameters that the forward freezes.
        """
        broadcasts, frozen = _compat.broadcasts_buffers(self.shadow.ddp), self.shadow.frozen
        if broadcasts:
            self.shadow.news.begin(self.shadow.inner)
        yield
        if self.shadow.frozen != frozen:
            self.announce("frozen", self.shadow.frozen)
        if broadcasts and (news := self.shadow.news.since(self.shadow.inner)) is not None:
            self.has_news = True
            self.announce("buffers", news)

    def give_buffers(self) -> None:
        """Copy buffers that the step has changed before its forward to all ranks; each active rank calls this."""
        self.announce("given", self.shadow.news.since(self.shadow.inner))
        with self.tail_log.own_collectives():
            self.shadow.sync_buffers(self.members.leader)

    @contextmanager
    def backward_in_pieces(self) -> Iterator[None]:
        """Wrap an active rank's backward that syncs, which joined ranks follow piece by piece."""
        task = -1

        def note(place: int, _: Any) -> None:
            nonlocal task
            if task == -1:
                self._pieces.begin(lambda: None)
            elif task != _compat.backward_in_progress():
                self._pieces.check_nested()
            task = _compat.backward_in_progress()
            self._pieces.note(place)

        watch = Watch(self.shadow.parameters)
        watch.begin(note)
        with ExitStack() as stack:
            stack.callback(watch.end)
            stack.callback(self._pieces.reset)
            yield

    def before_collective(self, ddps: bool) -> None:
        self._pieces.before_collective(ddps)

    @contextmanager
    def following_backward(self, output: Tensor) -> Iterator[None]:
        """Wrap a joined rank's part in such a backward; `output` is the result of its forward."""
        self._pieces.open(lambda: torch.autograd.backward(output))
        with ExitStack() as stack:
            stack.callback(self._pieces.reset)
            yield

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == FIRED:
            self._pieces.mirror(payload)
        elif kind == "frozen":
            self.has_frozen = True
            self.shadow.freeze(payload)
        else:
            take(payload, self.shadow.inner, self.shadow.parameters[0].device)
            if kind == "given":
                self.shadow.sync_buffers(self.members.leader)
            else:
                self.has_news = True


class LockstepJoin(Lockstep):
    """A `DistributedDataParallel` model in a lockstep loop.

    A joined rank takes part in the backward all-reduce with zero gradients and receives the average.

    Args:
        driver: See `Lockstep`.
        model: The model's shadow.
        joinables: See `Lockstep`.

    Raises:
        JoinTypeError: See `Lockstep`.
    """

    _model: LockstepModelParticipant

    def __init__(self, driver: StepDriver, model: ModelShadow, joinables: Sequence[Joinable] = ()) -> None:
        make = partial(LockstepModelParticipant, shadow=model)
        super().__init__(driver, make, joinables, unsynced_models([model.ddp]))
        self._in_pieces = False  # whether this rank follows this step's backward piece by piece
        self._has_gathered = False  # whether this step had a gather through which gradients flow
        self._shadow = self._model.shadow  # used often in a step
        self._begin_sync: Callable[[Tensor], None] = lambda _: None  # called in the middle of a backward
        self._enter_model: Callable[[], None] = lambda: None  # ends the wrapper's part before the model

    @property
    def _forwards_alone(self) -> bool:
        return not _compat.broadcasts_buffers(self._shadow.ddp)  # buckets are rebuilt in backward here

    @property
    def _whole(self) -> nn.Module:
        return self._shadow.ddp

    def _known(self) -> list[int] | None:
        return self._shadow.first.fired

    def _compare(self, known: Sequence[list[int] | None], has_batch: bool) -> None:
        self._shadow.news.forget()
        for fired in known:
            self._shadow.first.note_fired(fired)
        if has_batch:
            self._shadow.first.check_fired()

    def around_step(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._around_step() if self.in_tail else nullcontext()

    @contextmanager
    def _around_step(self) -> Iterator[None]:
        with self._shadow.step(shadow=self.joined), self._giving_buffers():
            yield
        # Rank 0 writes checkpoints, and DDP broadcasts its buffers before each forward, so it must always have the
        # newest ones. (A broadcast between forward and backward would disturb autograd.)
        has_news, self._model.has_news = self._model.has_news, False
        if (has_news or 0 not in self.active_ranks) and not self.keeps_buffers:
            # In the middle of an accumulation, an active rank keeps its own buffers, as in DDP.
            own = not self.joined and not self._shadow.ddp.require_forward_param_sync
            self._shadow.sync_buffers(self.active_ranks[0], keeps=own)
        if not self._shadow.ddp.broadcast_buffers:
            self._sync_norms(self._shadow.inner)

    def active_step(self) -> AbstractContextManager[None]:
        self._has_trained = True
        if self.in_tail:
            return self._active_step()
        self._exchanged.poll()
        return nullcontext()

    @contextmanager
    def _active_step(self) -> Iterator[None]:
        with ExitStack() as plumbing, self.driver.step(self.active_ranks):
            # Until the inner module runs, the collectives are DDP's own, which a shadow's forward issues too.
            plumbing.enter_context(self.driver.tail_log.own_collectives())
            self._enter_model = plumbing.close
            inside = self._shadow.inner.register_forward_pre_hook(lambda *_: plumbing.close())
            with inside, self._model.telling_changes():
                yield

    @contextmanager
    def before_forward(self) -> Iterator[None]:
        # DDP is about to broadcast the buffers of rank 0, which may have no batch in this step.
        ddp, inner = self._shadow.ddp, self._shadow.inner
        broadcasts = self.in_tail and ddp.require_forward_param_sync and _compat.broadcasts_buffers(ddp)
        before = {id(b): known(b) for b in inner.buffers() if not b.is_inference()} if broadcasts else {}
        yield
        if before and not all(is_known(b, before.get(id(b))) for b in inner.buffers()):
            self._model.give_buffers()

    def shadow_forward(self) -> Tensor:
        for compute in weight_hooks(self._shadow.inner):
            compute()
        output = self._shadow.forward()
        self._in_pieces = self.driver.follow(self.active_ranks)
        if self._model.has_frozen:
            output, self._model.has_frozen = self._shadow.forward_again(), False
        output = _with_gradient(output)
        if not self._in_pieces:
            return output
        return following_zero(partial(self._follow_backward, output), output.device)

    def _follow_backward(self, output: Tensor) -> None:
        with self._model.following_backward(output) if self._syncs else nullcontext():
            self.driver.follow(self.active_ranks)

    def run_inside(self, run: Callable[[], Any]) -> Any:
        """Run code that computes an active rank's loss, in place of the inner model in its wrapper's forward.

        The code's collectives then come after those of the wrapper, as on joined ranks.

        Args:
            run: Returns the loss. It may call the inner module any number of times.

        Returns:
            The value that `run` returns.
        """

        def forward(_: Tensor) -> Any:
            self._enter_model()
            return run()

        self._enter_model = lambda: None
        with self.active_step(), self.loss_step(forward):
            return self._shadow.ddp(torch.empty(0, device=self._shadow.parameters[0].device))

    @contextmanager
    def loss_step(self, run: Callable[..., Any] | None = None) -> Iterator[None]:
        """Wrap an active rank's forward, if its output is the step's loss, a dictionary with it, or `None`.

        `None` is replaced by a scalar zero, as from `shadow_forward`, if the other ranks need this rank in the
        backward. Such a zero is also added to a loss that does not depend on the model. Then `no_loss` is true.

        Args:
            run: See `ModelShadow.completing`.
        """
        self.no_loss = self.no_output = self._has_gathered = False
        self.driver.has_loss = True
        if self.channel.world_size == 1:
            yield
            return
        self.follows_backward = True
        try:
            with self._shadow.completing(self._complete, run):
                yield
        finally:
            self.follows_backward = False
            if self.no_loss:
                self._shadow.ddp.require_backward_grad_sync = self._shadow.ddp.require_forward_param_sync = True

    def note_gather(self) -> None:
        self._has_gathered = True

    def _complete(self, output: Any) -> Any:
        loss: Any = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and not loss.requires_grad:
            raise UnsupportedError(
                f"The loss of rank {self.channel.global_ranks[self.channel.rank]} does not require grad: it is a"
                " constant, or was computed under torch.no_grad. To skip a batch, return torch.zeros((),"
                " requires_grad=True)."
            )
        if output is not None and not (isinstance(loss, Tensor) and self._shadow.firing):
            return output  # or all are frozen: no rank's backward reaches the model
        if output is not None and self._shadow.is_reached_by(loss):
            return output
        if self._has_gathered or self.driver.tail_log.in_pieces or has_synced_norms(self._shadow.inner):
            what = "None" if output is None else "a loss that does not depend on the model"
            raise UnsupportedError(
                f"training_step returned {what}, but the other ranks' backward may have collectives that need this rank"
                " (SyncBatchNorm, all_gather(sync_grads=True)). Return a zero loss that depends on the same tensors"
                " (`0.0 * loss`), or remove such batches from the dataloader."
            )
        if not self._syncs:
            return output
        self.no_loss, self.no_output, self.driver.has_loss = True, output is None, False
        zero = _with_gradient(self._shadow.no_loss_output())
        if output is None:
            return zero
        # The loss's backward may run some of the model's backwards, each for a part of the batch (GradCache). DDP must
        # treat these as accumulation, so it is prepared after them, and not at the end of the wrapper's forward.
        self._shadow.ddp.require_backward_grad_sync = False
        loss = own_first(loss, lambda: self._begin_sync(zero), zero)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def backward(self, backward: Callable[[], None]) -> bool:
        """Run the backward of a step, on an active or a joined rank; if no rank has gradients, they stay cleared.

        An active rank without a loss runs it like a joined rank, since the other ranks need it there. If no rank has a
        loss or accumulated gradients, the averaged gradients would be zero, and momentum and weight decay would act on
        them, while a single process would have none. So ranks without a loss count themselves before their backward.
        Joined ranks do so only if the lowest active rank has reported that it has no loss. No rank completes the
        collectives before all ranks have come to them, so the count is complete afterwards. Ranks with a loss do
        nothing.

        Returns:
            `False` if it is known that no rank has a loss, which is unknown without a sync.
        """
        has_loss = self._run_backward(backward)
        if self._syncs and self.in_tail and (zeros := [each for each in self._stepped if is_sharded(each)]):
            self._states.take_shards(zeros)
        return has_loss

    def _run_backward(self, backward: Callable[[], None]) -> bool:
        if self._syncs:
            self.driver.synced_backwards += 1
        if not (self.joined or self.no_loss):
            with self.leaving_out():
                self._listening_to(backward)
            self._shadow.accumulated = not self._syncs
            return True
        parameters = self._shadow.parameters
        # If the lowest active rank has reported a loss, no joined rank needs to count.
        counts = self._syncs and not (self.joined and self.driver.has_loss)
        count = f"lossless/{self.driver.synced_backwards}"

        def add_count() -> None:
            if counts:
                self.channel.add(count, 1 if any(p.grad is not None for p in parameters) else 1 + _GRADIENTS)

        if self.joined and self._in_pieces:
            add_count()
            self._listening_to(backward)  # this follows the active ranks
        elif not (self.joined or self.no_output):
            counts = self._run_own(backward, add_count) and counts
        else:
            add_count()
            self._shadow.backward(partial(self._listening_to, backward))  # the framework's backward, with its hooks
        if not counts:
            return True
        _compat.wait_for_device(parameters[0].device.type, self._watch)
        total, world_size = self.channel.add(count, 0), self.channel.world_size
        for parameter in parameters if total // _GRADIENTS == world_size else ():
            parameter.grad = None
        return total % _GRADIENTS < world_size

    def _run_own(self, backward: Callable[[], None], add_count: Callable[[], None]) -> bool:
        """Run the backward of a loss that does not depend on the model; return whether the model got no gradient.

        Args:
            backward: Runs that backward, and then the backward of a zero, in which DDP averages the gradients.
            add_count: Called between the two, if the model got no gradient.
        """
        has_gradient, watch = False, Watch(self._shadow.parameters)

        def note(*_: Any) -> None:
            nonlocal has_gradient
            has_gradient = True

        with ExitStack() as stack:

            def begin_sync(zero: Tensor) -> None:
                watch.end()
                if has_gradient:
                    self._shadow.accumulated = True
                else:
                    add_count()
                stack.enter_context(self._shadow.around_backward(in_pieces=False))
                _compat.expect_gradients(self._shadow.ddp, zero)

            stack.enter_context(setting(self, _begin_sync=begin_sync))  # else a cycle would keep the group
            stack.callback(watch.end)
            stack.enter_context(self.leaving_out())
            watch.begin(note)
            self._listening_to(backward)
        return not has_gradient

    def leaving_out(self) -> AbstractContextManager[None]:
        """Wrap the backward of a loss whose batch may count 0."""
        return leaving_out(self._shadow.parameters) if self.counts_nothing else nullcontext()

    def _listening_to(self, backward: Callable[[], None]) -> None:
        whole = self.in_tail and not self.joined and not self.driver.tail_log.in_pieces
        with self.driver.backward() if whole else nullcontext():
            backward()
        self._shadow.first.finish_watching()
        self.check_reduced()

    def in_engine(self) -> AbstractContextManager[None]:
        follows = self.in_tail and not self.joined and self.driver.tail_log.in_pieces
        return self._followed_by_others() if follows else nullcontext()

    @contextmanager
    def _followed_by_others(self) -> Iterator[None]:
        pieces = self._model.backward_in_pieces() if self._syncs else nullcontext()
        with setting(self, follows_backward=True), self.driver.serving_backward(self.active_ranks), pieces:
            yield

    def check_reduced(self) -> None:
        """Raise DDP's own error if the backward that has just ended left parameters out; all ranks call this."""
        if self._syncs:
            with self.driver.tail_log.own_collectives() if self.in_tail else nullcontext():
                _compat.check_reduced(self._shadow.ddp, self._watch)

    def _watch(self) -> Callable[[], None]:
        """Return a function that raises, while this rank waits for its device, if another rank has failed."""
        check = self.channel.failure_check()

        def poll() -> None:
            try:
                check()
            except JoinError:
                _compat_groups.abort(self.driver.members.group, self._shadow.parameters[0].device.type)
                raise

        return poll

    @property
    def _syncs(self) -> bool:
        return bool(self._shadow.ddp.require_backward_grad_sync)

    def sync_buffers(self) -> None:
        if not self.keeps_buffers:
            self._shadow.sync_buffers(0)

    def use(self, model: ModelShadow) -> None:
        """Use another shadow, after the model has been wrapped again."""
        self._shadow = model
        self._model.use(model)

    def unfrozen(self, optimizers: Iterable[Any]) -> list[str]:
        return self._shadow.unfrozen(optimizers)


def _with_gradient(zero: Tensor) -> Tensor:
    """Return a zero from which a backward can start, even if all of a model's parameters are frozen."""
    return zero if zero.requires_grad else torch.zeros_like(zero, requires_grad=True)
