"""What the suite asks of a CPU: on another device, which TORCH_JOIN_TEST_DEVICE names, these tests are skipped."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

# By reason: functions, with all of their parameters, or with those in brackets, where * is anything.
CPU_ONLY: dict[str, tuple[str, ...]] = {
    "The emulated device has no sparse tensors, and NCCL sums none.": (
        "tests/core/_collectives/test_neutral.py::test_collectives_are_seen_in_every_form[sparse-*]",
        "tests/core/_handover/test_handover.py::test_every_rank_goes_on_as_the_source[*-sparse adam]",
        "tests/core/_handover/test_handover_objects.py::test_sparse_tensors",
        "tests/core/loops/test_combinations.py::test_a_sparse_gradient_that_was_changed_is_handed_over",
        "tests/core/loops/test_combinations.py::test_it_is_what_one_process_computes[sparse, masked]",
        "tests/lightning/_training/test_models.py::test_parameters_are_those_of_a_single_process[sparse]",
        "tests/lightning/_training/test_models.py::test_parameters_are_those_of_a_single_process[sparse-first]",
    ),
    "Rows for a file are given on the CPU.": ("tests/core/test_rows_file.py::test_what_all_ranks_have_written",),
    "Memory is measured where the CPU's is allocated.": (
        "tests/core/_handover/test_memory.py::test_an_active_rank_needs_no_more_in_the_tail",
    ),
    "It makes groups of gloo's, which records what is issued.": (
        "tests/core/backward/test_order.py::test_all_ranks_issue_everything_in_one_order",
    ),
    "Under the mode that puts tensors there, torch.compile runs collectives eagerly, and follows who listens.": (
        "tests/core/_collectives/test_neutral.py::test_collectives_are_seen_in_every_form[compiled for *]",
    ),
    "Only gloo has a monitored barrier.": (
        "tests/core/_collectives/test_tap.py::test_other_threads_are_not_listened_to_and_not_held_up",
    ),
    "Only gloo says that a peer's process has ended.": (
        "tests/core/_control/test_survivors.py::test_a_process_that_has_ended_is_seen_from_a_tail_too",
    ),
    "What is offloaded to the CPU is made and summed there, for which the group has no backend.": (
        "tests/lightning/test_sharded_random.py::test_a_few[4]",
    ),
    "On a device torch averages weights by other operations, in float32.": (
        "tests/lightning/_training/test_features.py::test_callbacks[2-5-saving-Model]",
        "tests/lightning/_training/test_features.py::test_callbacks[2-0-4-saving-Model]",
        "tests/lightning/_training/test_features.py::test_callbacks[5-0-3-scheduling-Model]",
    ),
}


def matches(entry: str, test: str) -> bool:
    """Whether a test, by the name that pytest gives it, is one of an entry's."""
    return test.partition("[")[0] == entry or fnmatchcase(test, entry.replace("[", "[[]"))


def entries() -> Iterator[tuple[str, str]]:
    """Yield each entry and its reason."""
    for reason, named in CPU_ONLY.items():
        for entry in named:
            yield entry, reason


def why_only_on_a_cpu(test: str) -> str | None:
    """Return why a test needs a CPU, if it does."""
    return next((reason for entry, reason in entries() if matches(entry, test)), None)
