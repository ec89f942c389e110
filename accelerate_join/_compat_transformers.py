"""Every private name of transformers and TRL that this package touches (seen in transformers 5.24.0, TRL 1.16).

`tests/transformers/test_compat.py` notices when one of them goes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import transformers.trainer as hf
from accelerate.state import GradientState
from transformers.trainer_pt_utils import find_batch_size

from torch_join.integration import check_names, setting

SEEN = "4.57 and 5.24"

# What trainers keep of the steps that they have made, and their `log` reports: of TRL, of sentence-transformers.
KEPT = ("_metrics", "_total_train_tokens", "accum_loss_components")
# Trainers that generate, score and gather in `_prepare_inputs`: what a rank without a batch has no part in.
GENERATING = ("GRPOTrainer", "RLOOTrainer")
# Packages of trainers whose `__init__` looks at the first sample of each dataset.
LOOKING = ("trl",)


def looks_at_samples(trainer: Any) -> bool:
    """Whether a trainer cannot be made with a dataset of no samples."""
    return any(base.__module__.partition(".")[0] in LOOKING for base in type(trainer).__mro__)


def rows_of(batch: Any) -> int | None:
    """Return the number of rows of a batch, as Trainer finds it, or that of a list in it where there is no tensor."""
    found: int | None = find_batch_size(batch)  # type: ignore[no-untyped-call]
    lists = batch.values() if isinstance(batch, Mapping) else [batch]
    return next((len(each) for each in lists if isinstance(each, list)), None) if found is None else found


# Returns a loader without its first batches, as Accelerate does.
skip_first_batches: Callable[[Any, int], Any] = hf.skip_first_batches  # type: ignore[attr-defined]


def skipping(skip: Callable[[Any, int], Any]) -> AbstractContextManager[None]:
    """Within, Trainer leaves out the batches that were trained on before a checkpoint by this function."""
    return setting(hf, skip_first_batches=skip)


@contextmanager
def active_loader(loader: Any) -> Iterator[None]:
    """Within, Accelerate asks `loader` whether it has come to its end."""
    state = GradientState()
    state._add_dataloader(loader)
    try:
        yield
    finally:
        state._remove_dataloader(loader)


check_names(
    "transformers",
    SEEN,
    {
        hf: "skip_first_batches",
        hf.Trainer: "_inner_training_loop _maybe_log_save_evaluate _get_num_items_in_batch set_initial_training_values"
        " _get_train_sampler _get_eval_sampler _save_rng_state _load_optimizer_and_scheduler",
        GradientState: "_add_dataloader _remove_dataloader",
    },
)
