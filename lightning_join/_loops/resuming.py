"""Checkpoints with the place of every rank in its dataloaders.

Lightning saves the state of rank 0's dataloaders, after what has been read ahead, and gives it to every
rank. Here the file holds each rank's own, as of the batches that training has taken. Dataloaders without a state
begin anew, as Lightning documents.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_join import _compat
from lightning_join._compat import FitLoop
from lightning_join._protocol import rebalancing_of, strategy_of
from lightning_join._reading.fetcher import Place, ReadAheadFetcher
from lightning_join._reading.stateful import epochs_of
from torch_join import JoinError, UnsupportedError
from torch_join.integration import name_ranks

_KEY = "torch_join"


def load_in_one_process(checkpoint: dict[str, Any], fitting: bool) -> None:
    """Prepare a checkpoint for one process, whose loops are Lightning's own, to go on from if it is `fitting`.

    Raises:
        UnsupportedError: Several ranks have written it in an epoch.
    """
    state = checkpoint.get("loops", {}).get("fit_loop", {})
    record = state.get("state_dict", {}).get(_KEY)
    if not fitting or record is None or record["world_size"] == 1:
        return
    epochs = state["epoch_progress"]["current"]
    _check_world(record["world_size"], 1, is_over=epochs["ready"] == epochs["processed"])
    state["state_dict"].pop("combined_loader", None)


def _check_world(ranks: int, world_size: int, is_over: bool) -> None:
    if not is_over:
        raise UnsupportedError(
            f"The checkpoint was written in the middle of an epoch by {ranks} ranks, each with a state of its own"
            f" dataloaders, and this job has {world_size}. Resume with {ranks} ranks, or from a checkpoint"
            " of an epoch's end."
        )
    rank_zero_warn(
        f"The checkpoint was written by {ranks} ranks and this job has {world_size}, so the states of its"
        " dataloaders are left out: the next epoch begins with new ones."
    )


class ResumingFitLoop(FitLoop):
    """Lightning's fit loop, with every rank's place in its dataloaders in checkpoints."""

    _stateful = False  # whether some rank's dataloaders have a state
    _record: dict[str, Any] | None = None  # of the checkpoint, until its epoch begins
    _most_gifts: list[int] | None = None  # by rank, in the epoch that is resumed
    _unsaid: Sequence[int] = ()  # ranks that could not say there how many batches they have
    _was_even = False  # whether there was nothing to rebalance in it
    _last_place: Place | None = None  # where this rank was when the fit ended

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Collect every rank's place on rank 0; all ranks meet.

        Raises:
            UnsupportedError: Some rank cannot take part.

        """
        trainer: Any = self.trainer
        if (ranks := strategy_of(self.trainer).step_ranks) is not None:
            raise UnsupportedError(
                f"A checkpoint cannot be saved inside of a step that only {name_ranks(ranks)} of {trainer.world_size}"
                " ranks have a batch for: saving takes part of every rank. Save it from a hook of the module or of a"
                " callback, `on_train_batch_end` for example."
            )
        state: dict[str, Any] = super(FitLoop, self).on_save_checkpoint()  # Lightning's own is what this replaces
        if not self._stateful:
            return state
        progress: Any = self.epoch_loop.batch_progress
        record = self._record or {
            "step": progress.current.processed,
            "over": progress.current.ready == progress.current.processed and progress.is_last_batch,
            "world_size": trainer.world_size,
            **self._plan_now(progress.current.processed),
        }
        places = self._gather(self._place())
        if any(place is not None for place in places.values()):
            state[_KEY] = {**record, "places": places}
        if (place := places.get(0)) is not None:
            state["combined_loader"] = place["states"]  # what Lightning's own strategies look for
        return state

    def _plan_now(self, step: int) -> dict[str, Any]:
        join = strategy_of(self.trainer).join
        plan = join.plan if join is not None else None
        if plan is None:
            return {"even": rebalancing_of(self.trainer) is not None}
        return {"most_gifts": plan.most_gifts, "unknown": plan.unknown_at(step)}

    def take_plan(self) -> tuple[int | None, bool, bool]:
        """Return what this rank said of the epoch that is resumed, once.

        Returns:
            How many batches it may give away in a step, if it said so; whether it could not say how many it has left;
            whether all had as many, so that nothing is rebalanced in the epoch, even if that proves wrong.
        """
        most, unknown, even, rank = self._most_gifts, self._unsaid, self._was_even, self.trainer.global_rank
        self._most_gifts, self._unsaid, self._was_even = None, (), False
        return most[rank] if most is not None else None, rank in unknown, even

    def _place(self) -> Place | None:
        if self._record is not None:  # saved before the resumed epoch has begun
            place: Place | None = self._record["places"].get(self.trainer.global_rank)
            return place
        fetcher = self._data_fetcher
        if not isinstance(fetcher, ReadAheadFetcher):
            return self._last_place
        progress: Any = self.epoch_loop.batch_progress.current
        in_step = progress.ready > progress.processed and not strategy_of(self.trainer).joined
        return fetcher.place(repeats=in_step)

    def _gather(self, place: Place | None) -> dict[int, Place | None]:
        trainer = self.trainer
        # Not over the channel, which is closed after the fit; and each state goes to the rank that writes only.
        places: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
        dist.gather_object(place, places)
        return {trainer.global_rank: place} if places is None else dict(enumerate(places))

    def keep_place(self) -> None:
        """Remember at the fit's end where this rank is, for checkpoints that are saved after it."""
        self._last_place = self._place()
        self._record = None

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._record = state_dict.get(_KEY)

    def start_reading(self, fetcher: ReadAheadFetcher) -> None:
        """Make the epoch's iterator, in the first epoch after a checkpoint where that left off.

        Raises:
            UnsupportedError: On all ranks, if another number of ranks has written the checkpoint.
            JoinError: The epoch has become shorter than what was trained of it.

        """
        trainer = self.trainer
        record, self._record = self._record, None
        states, self._combined_loader_states_to_load = self._combined_loader_states_to_load, []
        resumes = self.epoch_loop.batch_progress.current.ready > 0
        if record is None:
            fetcher.start(self._as_lightning(states) if states and resumes else None)
            return
        self._most_gifts, self._unsaid = (
            (record.get("most_gifts"), record.get("unknown", ())) if resumes else (None, ())
        )
        self._was_even = resumes and not record["over"] and record.get("even", False)
        if self._most_gifts is not None and not record["over"] and rebalancing_of(trainer) is None:
            raise UnsupportedError(
                "The checkpoint was written in the middle of an epoch in which batches were rebalanced, so the steps"
                " that were made are not the batches that each rank has used. Resume with rebalance=True, or from a"
                " checkpoint of an epoch's end."
            )
        if record["world_size"] != trainer.world_size:
            self._most_gifts, self._unsaid, self._was_even = None, (), False
            self._start_in_another_world(fetcher, record, resumes)
            return
        place = record["places"].get(trainer.global_rank)
        if place is not None and record["step"] and not resumes:
            if place["states"]:  # else there is nothing to bring to its end
                self._end_epoch(fetcher, place)
            place = None
        try:
            fetcher.start(place)
        except StopIteration as error:  # which would end the fit on this rank alone
            raise JoinError(
                "A train dataloader has come to its end before the place in the epoch at which the checkpoint was"
                " written. In the epoch that is resumed it must yield the batches that it yielded then."
            ) from error

    def _end_epoch(self, fetcher: ReadAheadFetcher, place: Place) -> None:
        # The state counts samples of the epoch before, which may have been longer.
        progress: Any = self.epoch_progress.current
        epoch = progress.processed
        for shown in (epoch - 1, epoch):
            for part in fetcher.combined_loader.flattened:
                _compat.set_sampler_epoch(part, max(shown, 0))
            if shown < epoch:
                fetcher.end_at(place)

    def _as_lightning(self, states: list[dict[str, Any]]) -> Place | None:
        rank_zero_warn(
            "The checkpoint was written in the middle of an epoch by a strategy that saves the state of rank 0's"
            " dataloaders only. Every rank goes on from that state, so some batches may be trained on twice and"
            " others not at all. Resume from the end of an epoch, or write checkpoints with strategy='ddp_join'."
        )
        loader = self._combined_loader
        assert loader is not None
        if not any(isinstance(part, _compat.Stateful) for part in loader.flattened):
            return None
        taken = self.epoch_loop.batch_progress.current.ready
        epochs = epochs_of(loader.flattened)
        return {"states": states, "epochs": epochs, "cycled": [], "skipped": 0, "taken": taken, "left": False}

    def _start_in_another_world(self, fetcher: ReadAheadFetcher, record: dict[str, Any], resumes: bool) -> None:
        _check_world(record["world_size"], self.trainer.world_size, is_over=not resumes or record["over"])
        fetcher.start()
        if resumes:
            fetcher.end_here()
