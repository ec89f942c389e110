"""Ray Train: reports inside uneven loops, and other calls that wait for all workers."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable

from torch_join._base.attributes import replace
from torch_join._base.errors import UnsupportedError, name_ranks
from torch_join._compat import launchers as _compat
from torch_join._participants.participant import Driver, Participant


class Report(Joinable):
    """`ray.train.report` for the body of an uneven loop: workers that have run out of batches report too.

    ```python
    report = Report()
    with Join([ddp, optimizer, report]) as join:
        for batch in join.batches(loader):
            ...
            report({"loss": loss.item()}, checkpoint)
    ```

    Call it like `ray.train.report`, on all workers that have a batch, at the same step, after the step's forward.
    Ray keeps the metrics of rank 0. If that worker has run out of batches, it reports those of the lowest active rank.
    Pass the checkpoint on one rank, such as `join.active_ranks[0]`. Outside a `with`, calls go to `ray.train.report`.
    """

    has_group = False  # it uses the process group of the other joinables
    _part: "ReportParticipant | None" = None

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, metrics: dict[str, Any], checkpoint: Any = None, **options: Any) -> None:
        """Report metrics, and optionally a checkpoint; all workers that have a batch call this.

        Args:
            metrics: As for `ray.train.report`: numbers, strings and the like.
            checkpoint: A `ray.train.Checkpoint` of this worker, if it has written one.
            **options: The other arguments of `ray.train.report`.

        Raises:
            JoinTypeError: Another rank has to report `metrics`, but they cannot be pickled.
        """
        if self._part is None:
            _report(metrics, checkpoint=checkpoint, **options)
        else:
            self._part.report(metrics, checkpoint, options)

    def join_hook(self, **_: Any) -> NoReturn:
        """Refuse torch's own `Join`.

        Raises:
            UnsupportedError: Always: torch's `Join` does not know whose metrics count.
        """
        raise UnsupportedError(
            "Report does not work in torch's own Join. Pass it to torch_join.Join or a front end built on it."
        )

    @property
    def join_device(self) -> torch.device:
        """The CPU: torch's joinables have a device, but this one does not need it."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The group of all workers."""
        return dist.group.WORLD


class _Reported(NamedTuple):
    """The report for joined ranks: users' objects, sent pickled over the process group."""

    metrics: dict[str, Any]
    checkpoint_dir_name: str | None  # Ray uses rank 0's name


class ReportParticipant(Participant):
    """Makes joined ranks report the metrics of the lowest active rank."""

    kinds: ClassVar[dict[str, Any]] = {"report": None}
    tail_log: Any  # of a loop: a `TailLog`

    def __init__(self, driver: Driver, index: int, joinable: Report) -> None:
        super().__init__(driver, index)
        self._joinable = joinable

    def renew(self) -> None:
        """Do nothing, since there is no state to renew between epochs."""

    def enter(self) -> None:
        self._undo.append(replace(self._joinable, _part=self))

    def report(self, metrics: dict[str, Any], checkpoint: Any, options: dict[str, Any]) -> None:
        """Report on an active rank."""
        self.announce_open("report", _Reported(metrics, options.get("checkpoint_dir_name")))
        with self.tail_log.on_all_ranks():
            _report(metrics, checkpoint=checkpoint, **options)

    def mirror(self, kind: str, payload: _Reported) -> None:
        _report(payload.metrics, checkpoint_dir_name=payload.checkpoint_dir_name)


class RayParticipant(Participant):
    """Refuses calls that wait for all workers of Ray Train in a step of the tail."""

    def enter(self) -> None:
        worker = _compat.train_worker()
        for name in _compat.WAITS_FOR_ALL:
            self.override(worker, name, partial(self._call, name))

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.tail_log.meet():
            advice = "Call it after the loop."
            if name == "report":
                advice = "Pass a torch_join.ray.Report() to Join and call that instead, or report after the loop."
            raise UnsupportedError(
                f"{_compat.WAITS_FOR_ALL[name]} was called in a step for which"
                f" {name_ranks(self.members.joined_names)} had no batch. The call waits for all workers, but a"
                f" finished worker does not run the loop's body. {advice}"
            )
        return function(*args, **kwargs)


def runs_in_ray() -> bool:
    """Whether Ray Train runs this process, and so runs all ranks."""
    return _compat.train_worker() is not None


def _report(metrics: dict[str, Any], **options: Any) -> None:
    import ray.train

    ray.train.report(metrics, **options)
