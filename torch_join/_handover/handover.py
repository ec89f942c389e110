"""The handover: copies all replicated state from one rank to all others, bit for bit.

In a plain loop, a finished rank does not step its replicated optimizers, because changes that user code makes to
gradients cannot be announced. When the last rank finishes, its models, optimizers, LR schedulers, GradScalers and all
other objects with a state replace those of the other ranks.

First a schema is broadcast: the state as a tree with slots in place of tensors. From it the other ranks create the
tensors that they lack and drop those that the source lacks; parameters, buffers and the optimizers' tensors keep their
identity. Then the contents of the tensors are sent over the given group. Gradients are not handed over: `.grad` stays
unchanged on each rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_join._base.errors import JoinError, JoinTypeError, JoinValueError
from torch_join._base.pytree import Captured
from torch_join._base.specs import TensorSpec
from torch_join._control.channel import Channel
from torch_join._control.codec import closed
from torch_join._handover import objects as _objects
from torch_join._handover import transfer as _transfer
from torch_join._handover.early_exit import ExitReport, check
from torch_join._handover.replicas import ignored_parameters, kind_of, named
from torch_join._handover.state import Capture, Restore

_Problem = tuple[bool, str]  # an error that is sent to other ranks: whether it is a `JoinTypeError`, and its text


class _Schema(NamedTuple):
    captured: list[Captured]
    specs: list[TensorSpec]
    contents: bytes | None  # of the tensors, if these are few and small


@closed("handover")
class _Message(NamedTuple):
    """A rank's message to the others before the transfer."""

    source: int
    given: list[str]
    problem: _Problem | None = None
    nbytes: int = 0  # of the schema, on the source
    left: ExitReport | None = None


def hand_over(
    objects: Sequence[Any],
    source: int,
    channel: Channel,
    group: dist.ProcessGroup | None = None,
    local: frozenset[int] | None = None,
    left: ExitReport | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Replace the state of `objects` on every rank by that of one rank, bit for bit.

    Every rank of the group calls this at the same time. Models are handed over first, then
    optimizers, LR schedulers, GradScalers and others, in any order of `objects`.

    Args:
        objects: Models, optimizers, LR schedulers, GradScalers and anything else with `state_dict` and
            `load_state_dict`: the same number and types on every rank.
        source: The rank of the group whose state is copied.
        channel: The group's channel.
        group: The process group, by default the whole world.
        local: The `id` of each parameter that stays unchanged on each rank, with its optimizer state: by default all
            that DDP ignores.
        left: How this rank has left its loop, if all ranks are to `check` that first.
        meanwhile: Called on each rank while its message is being sent.

    Raises:
        JoinTypeError: An object, or a part of it, is of a kind that cannot be handed over.
        JoinValueError: The ranks pass different objects or different sources. Every rank raises, and nothing has been
            changed.
        PeerFailedError: Another rank has failed.
        JoinTimeoutError: Another rank did not call this in time.

    Limits:
        The state of a ZeroRedundancyOptimizer is sharded and stays where it is; its hyperparameters are handed over.
        `.grad` is not handed over. Parameters must have the same form on all ranks; buffers need not.
    """
    if not 0 <= source < channel.world_size:
        raise JoinValueError(f"The source rank must be between 0 and {channel.world_size - 1}, not {source}.")
    # Optimizer state that is created here must not consist of inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        local = frozenset(map(id, ignored_parameters(objects).values())) if local is None else local
        capture = Capture(local=local)
        message, packed = _message(objects, source, channel, capture)
        pending = channel.begin_gather(message._replace(left=left), of=_Message)
        meanwhile()
        messages = pending()
        check([message.left for message in messages if message.left is not None], channel.global_ranks, channel.rank)
        _raise_any([message.problem for message in messages])
        _agree(messages)
        if channel.world_size == 1:
            return
        schema: _Schema = _objects.broadcast(packed, source, group, messages[source].nbytes)
        restore = Restore(schema.specs, local)
        problem = None if channel.rank == source else _prepare(objects, schema, restore)
        _raise_any(channel.gather(problem, of=_Problem | None))
        if schema.contents is None:
            tensors = [[tensor] for tensor in capture.tensors] if channel.rank == source else restore.targets
            _transfer.broadcast(schema.specs, tensors, source, group)
        elif channel.rank != source:
            _transfer.unpack(schema.contents, schema.specs, restore.targets)
        restore.finish()


def _message(objects: Sequence[Any], source: int, channel: Channel, capture: Capture) -> tuple[_Message, bytes | None]:
    """Return this rank's message and, on the source, the packed schema, after which nothing can fail there."""
    try:
        ordered = named(objects)
        given = [type(value).__name__ for _, value in ordered]
        if channel.rank != source:
            return _Message(source, given), None
        captured = [kind_of(value).capture(value, capture, name) for name, value in ordered]
        contents = _transfer.pack(capture.specs, capture.tensors)
        packed = _objects.pack(_Schema(captured, capture.specs, contents), "The state")
        return _Message(source, given, nbytes=len(packed)), packed
    except Exception as error:
        return _Message(source, [], _problem(error)), None


def _problem(error: Exception) -> _Problem:
    text = str(error) if isinstance(error, JoinError) else f"{type(error).__name__}: {error}"
    return isinstance(error, JoinTypeError), text


def _prepare(objects: Sequence[Any], schema: _Schema, restore: Restore) -> _Problem | None:
    try:
        for captured, (name, value) in zip(schema.captured, named(objects), strict=True):
            kind_of(value).restore(captured, value, restore, name)
    except Exception as error:
        return _problem(error)
    return None


def _raise_any(problems: Sequence[_Problem | None]) -> None:
    found = [problem for problem in problems if problem is not None]
    if not found:
        return
    ranks_by_text = _by_rank([None if problem is None else problem[1] for problem in problems])
    is_of_type, _ = found[0]
    raise (JoinTypeError if is_of_type else JoinValueError)(
        " ".join(f"{ranks}: {text}" for text, ranks in ranks_by_text.items())
    )


def _agree(messages: Sequence[_Message]) -> None:
    given = _by_rank([f"[{', '.join(message.given)}]" for message in messages])
    if len(given) > 1:
        lists = "; ".join(f"{ranks} gave {text}" for text, ranks in given.items())
        raise JoinValueError(f"The ranks passed different objects: {lists}. Pass the same objects on every rank.")
    sources = _by_rank([str(message.source) for message in messages])
    if len(sources) > 1:
        lists = "; ".join(f"{ranks} said {text}" for text, ranks in sources.items())
        raise JoinValueError(f"The ranks passed different source ranks: {lists}. Pass the same one on every rank.")


def _by_rank(texts: Sequence[str | None]) -> dict[str, str]:
    """Return, for each text, the ranks that sent it, in words."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks.setdefault(text, []).append(str(rank))
    return {text: f"Rank{'s' * (len(those) > 1)} {', '.join(those)}" for text, those in ranks.items()}
