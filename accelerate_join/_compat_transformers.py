"""Every private name of transformers and TRL that this package uses (seen in transformers 5.24.0, TRL 1.16).

`tests/transformers/test_compat.py` fails when one of them disappears.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import transformers
import transformers.trainer as hf
from transformers.trainer_pt_utils import find_batch_size

from torch_join import UnsupportedError
from torch_join.integration import check_names, setting

SEEN = "4.57 and 5.24"

# Attributes in which the trainers of TRL and sentence-transformers collect values for `log`.
KEPT = ("_metrics", "_total_train_tokens", "accum_loss_components")
# Trainers that generate, score and gather in `_prepare_inputs`, which a rank without a batch does not call.
GENERATING = ("GRPOTrainer", "RLOOTrainer")
# Packages whose trainers read the first sample of each dataset in `__init__`.
LOOKING = ("trl",)


def reads_samples(trainer: Any) -> bool:
    """Whether this trainer's `__init__` fails with an empty dataset."""
    return any(base.__module__.partition(".")[0] in LOOKING for base in type(trainer).__mro__)


def rows_of(batch: Any) -> int | None:
    """Return the number of rows in a batch as Trainer finds it, or its first list's length if it has no tensor."""
    found: int | None = find_batch_size(batch)  # type: ignore[no-untyped-call]
    lists = batch.values() if isinstance(batch, Mapping) else [batch]
    return next((len(each) for each in lists if isinstance(each, list)), None) if found is None else found


# Returns a loader without its first batches, as Accelerate does.
skip_first_batches: Callable[[Any, int], Any] = hf.skip_first_batches  # type: ignore[attr-defined]


def skipping(skip: Callable[[Any, int], Any]) -> AbstractContextManager[None]:
    """In this context, Trainer calls `skip` to skip the batches that were trained on before a checkpoint."""
    return setting(hf, skip_first_batches=skip)


def steps_in(folder: str) -> int:
    """Return the number of optimizer steps recorded in a checkpoint."""
    return transformers.TrainerState.load_from_json(str(Path(folder, hf.TRAINER_STATE_NAME))).global_step  # type: ignore[no-any-return]


def check_resizes(trainer: Any, has_other_ranks: bool) -> None:
    """Raise if this trainer cannot resume after epochs that had a different number of steps.

    Args:
        trainer: The trainer.
        has_other_ranks: Whether the number of ranks has changed, rather than the data.

    Raises:
        UnsupportedError: The trainer cannot resume.
    """
    if not (hasattr(hf.Trainer, "_run_epoch") and hasattr(hf.Trainer, "_init_training_state")):
        raise UnsupportedError(
            "The checkpoint contains epochs with a different number of steps, but transformers"
            f" {transformers.__version__} assumes that all of them had this job's number of steps. Use transformers"
            " 5, resume with the same ranks and data, or set ignore_data_skip=True."
        )
    if has_other_ranks and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        raise UnsupportedError(
            "The checkpoint of a sharded model was written in the middle of an epoch by a different number of ranks."
            " This is untested with Trainer. Resume with the same number of ranks, or from a checkpoint written at"
            " the end of an epoch."
        )


def refuse_to_resize(folder: str, world_size: int) -> None:
    """Raise if a checkpoint without positions was written in mid-epoch by a different number of ranks.

    Raises:
        UnsupportedError: It was.
    """
    state = Path(folder, hf.TRAINER_STATE_NAME)
    writers = len([*Path(folder).glob("rng_state_*.pth")]) or int(Path(folder, "rng_state.pth").exists())
    if not state.exists() or writers in (0, world_size):
        return
    epoch = transformers.TrainerState.load_from_json(str(state)).epoch or 0
    if epoch != int(epoch):
        raise UnsupportedError(
            f"The checkpoint was written in the middle of an epoch by {writers} ranks, and this job has {world_size}."
            " JoinTrainer can change the number of ranks only if it wrote the checkpoint and both jobs have two ranks"
            f" or more. Resume with {writers} ranks, from the end of an epoch, or with ignore_data_skip=True."
        )


check_names(
    "transformers",
    SEEN,
    {
        hf: "skip_first_batches",
        hf.Trainer: "_inner_training_loop _maybe_log_save_evaluate _get_num_items_in_batch set_initial_training_values"
        " _get_train_sampler _get_eval_sampler _save_rng_state",
    },
)
