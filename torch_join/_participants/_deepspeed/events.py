"""An engine's events: an active rank announces them, a joined rank replays them with zeros for gradients.

From the start of a forward to the end of its backward, an engine's communication depends on these events

    the engine's forward starts                  optimizer.clear_backward_seen_flag()                stages 1 to 3
    the root module's forward starts             coordinator.reset_step()                            stage 3
    a module's forward, or backward, starts/ends parameter_offload.{pre,post}_sub_module_*_function  stage 3
    parameters are gathered, or freed, separately  parameter.all_gather(), .partition()              stage 3
    the engine's backward starts                 engine._backward_prologue()                         all
    a parameter's gradient is there              optimizer.process_gradients, or                     stages 1, 2
                                                 optimizer.reduce_ready_partitions_and_remove_grads  stage 3

and on the engine's own state: traces, prefetched parameters, buckets, micro steps. A joined rank that makes the same
calls in the same order issues the same collectives, with its own shards, and its engine has the same state afterwards.
Every rank itself runs the rest: the epilogue of the backward, overflow checks, the norm, the step, its scheduler.

Following only the collectives would leave that state stale, and stage 3 uses it to decide which parameters to gather
next. A graph of zeros instead of the model's graph would produce gradients in another order. Stages 1 and 2 fill a
bucket in the order of the gradients, and add its n-th slice to the n-th slices of other ranks.

Seen in DeepSpeed 0.19.8.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from torch_join._base.attributes import setting
from torch_join._base.weighting import finite
from torch_join._compat import deepspeed as _compat
from torch_join._control.codec import foreign
from torch_join._participants._gradients.watch import leaving_out
from torch_join._participants.participant import Driver, Participant


class EngineParticipant(Participant):
    """A `DeepSpeedEngine`: announces its events on an active rank, and follows them on a joined rank.

    Args:
        driver: See `Participant`.
        index: See `Participant`.
        engine: The engine.

    Attributes:
        parameters: All parameters, in the same order on all ranks.

    Raises:
        UnsupportedError: The engine uses a feature in which a joined rank cannot take part.
    """

    kinds: ClassVar[dict[str, Any]] = {
        "forward": type(None),
        "reset": type(None),
        "module": tuple[int, int, list[tuple[int, bool]]],  # phase, module, other modules' parameters that it uses
        "gather": list[int],
        "partition": list[int],
        "prologue": list[int],  # the parameters that do not train
        "gradient": int,
        "present": list[int],
    }

    tail_log: Any  # of a loop: a `TailLog`

    def __init__(self, driver: Driver, index: int, engine: Any) -> None:
        super().__init__(driver, index)
        _compat.check_engine(engine)
        self.engine = engine
        self.stage = int(engine.zero_optimization_stage())
        self._counts_nothing = False
        self.parameters: list[Any] = list(engine.module.parameters())
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._modules: list[nn.Module] = list(engine.module.modules())
        self._places = {id(module): place for place, module in enumerate(self._modules)}
        self._groups: dict[int, int] = {}

    @property
    def device(self) -> torch.device:
        """The parameters' device."""
        device: torch.device = self.parameters[0].device
        return device

    def enter(self) -> None:
        engine, optimizer = self.engine, self.engine.optimizer
        if self.stage == 3:
            offload = _compat.offload_of(engine)
            for phase, name in enumerate(_compat.PHASES):
                self.announce_calls(offload, name, "module", partial(self._of_module, phase), hold=True)
            self.announce_calls(offload.get_param_coordinator(), "reset_step", "reset")
            for parameter in self.parameters:
                self.announce_calls(parameter, "all_gather", "gather", partial(self._listed, parameter))
                self.announce_calls(parameter, "partition", "partition", partial(self._listed, parameter), hold=True)
                self._flush_before(parameter, "all_gather_coalesced")
            if hasattr(optimizer, _compat.REDUCE_BUCKET_3):  # else the engine only evaluates
                name = "reduce_ready_partitions_and_remove_grads"
                self.announce_calls(optimizer, name, "gradient", self._number, hold=True)
                self.override(optimizer, name, self._taking)
                self._flush_before(optimizer, _compat.REDUCE_BUCKET_3)
        elif self.stage:
            self._groups = _compat.groups_of(engine)
            self.announce_calls(
                optimizer, "process_gradients", "gradient", lambda parameter, _: self._number(parameter), hold=True
            )
            self.override(optimizer, "process_gradients", self._taking)
            self._flush_before(optimizer, "reduce_ipg_grads")
        if self.stage and hasattr(optimizer, "clear_backward_seen_flag"):
            self.announce_calls(optimizer, "clear_backward_seen_flag", "forward", hold=True)
        self.announce_calls(engine, "_backward_prologue", "prologue", self._frozen, hold=True)

    # ------------------------------------------------------------ on an active rank

    def is_quiet(self) -> bool:
        return self.members.serves or self.is_inside or self.tail_log.is_quiet()

    def _flush_before(self, owner: Any, name: str) -> None:
        """Send the held announcements, which are then complete, right before a function that issues collectives."""

        def flushing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.members.announces:
                self.tail_log.flush()
            return original(*args, **kwargs)

        self.override(owner, name, flushing)

    @contextmanager
    def leaving_out(self, counts_nothing: bool) -> Iterator[None]:
        """Wrap a backward; if its loss counts 0 (`counts_nothing`), replace gradients that are not finite."""
        # In stages 0 and 1 gradients are added to existing ones. In stage 3 a watch would hold nodes of empty shards.
        watched = [p for p in self.parameters if p.requires_grad and counts_nothing and self.stage < 2]
        with setting(self, _counts_nothing=counts_nothing and self.stage > 1), leaving_out(watched):
            yield

    def _taking(self, original: Callable[..., Any], parameter: Any, *args: Any) -> Any:
        if self._counts_nothing and parameter.grad is not None:
            parameter.grad.copy_(finite(parameter.grad))
        return original(parameter, *args)

    def send_present(self) -> None:
        """Announce, before the epilogue, which gradients exist, unless they were announced one by one."""
        if self.stage == 1 and not self.is_quiet() and not _compat.has_gradient_hooks(self.engine):
            self.announce("present", [n for n, p in enumerate(self.parameters) if p.grad is not None])

    def _number(self, parameter: Any) -> int:
        return self._numbers[id(parameter)]

    def _frozen(self) -> list[int]:
        return [number for number, parameter in enumerate(self.parameters) if not parameter.requires_grad]

    def _listed(self, parameter: Any, param_list: Any = None, *_: Any, **__: Any) -> list[int]:
        return [self._number(each) for each in ([parameter] if param_list is None else param_list)]

    def _of_module(self, phase: int, module: Any) -> tuple[int, int, list[tuple[int, bool]]]:
        # Do not use DeepSpeed's own number, which counts the modules of all engines in a process.
        externals = [(self._number(p), dangles) for p, dangles in _compat.externals_of(module)]
        return phase, self._places[id(module)], externals

    # ------------------------------------------------------------ on a joined rank

    @torch.no_grad()
    def mirror(self, kind: str, payload: Any) -> None:
        if kind == "module":
            self._pass_module(*payload)
        elif kind == "gradient":
            parameter = self._parameter(payload)
            self._fill(parameter)
            _compat.take_gradient(self.engine, parameter, self._groups.get(id(parameter), 0))
        elif kind == "present":
            for number in payload:
                self._fill(self._parameter(number))
        elif kind in ("gather", "partition"):
            parameters = [self._parameter(number) for number in payload]
            run = parameters[0].all_gather if kind == "gather" else parameters[0].partition
            run(param_list=parameters)
        elif kind == "reset":
            _compat.offload_of(self.engine).get_param_coordinator().reset_step()
        elif kind == "forward":
            self.engine.optimizer.clear_backward_seen_flag()
        else:
            # Code on the active ranks may have frozen parameters in this tail; stage 3 does not reduce their gradients.
            if payload != self._frozen():
                for number, parameter in enumerate(self.parameters):
                    parameter.requires_grad_(number not in payload)
            self.engine._backward_prologue()

    def without(self, numbers: Sequence[int]) -> list[Any]:
        """Return the parameters except those with these numbers."""
        left_out = {*numbers}
        return [parameter for number, parameter in enumerate(self.parameters) if number not in left_out]

    def _parameter(self, number: int) -> Any:
        if not 0 <= number < len(self.parameters):
            raise foreign("a record of an engine", f"parameter {number} of {len(self.parameters)}")
        return self.parameters[number]

    def _fill(self, parameter: Any) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # whole even in stage 3, where its module is gathered now

    def _pass_module(self, phase: int, number: int, externals: list[tuple[int, bool]]) -> None:
        if not 0 <= number < len(self._modules) or not 0 <= phase < len(_compat.PHASES):
            raise foreign("a record of an engine", f"phase {phase} of module {number}")
        module = self._modules[number]
        # A module's forward shows that it uses another module's parameter. This rank may have run no forward since, and
        # would prefetch fewer parameters than the other ranks.
        for parameter, dangles in externals:
            _compat.add_external(module, self._parameter(parameter), dangles)
        getattr(_compat.offload_of(self.engine), _compat.PHASES[phase])(module)
        if phase == _compat.FORWARD_ENDS:
            _compat.end_forward(module)
