"""Notices when a private name that we rely on goes; the behaviour behind it is tested elsewhere."""

import inspect
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric, MetricCollection

from torch_join._compat import ddp as torch_compat


def test_torchmetrics() -> None:
    names = {*dir(Metric), *inspect.getsource(Metric.__init__).split()}
    collection = MetricCollection([])
    assert {"_groups_checked", "_compute_groups_create_state_ref"} <= {*dir(collection), *vars(collection)}
    assert {"self._update_count", "self._computed", "self._forward_cache"} <= {n.rstrip(":") for n in names}


def test_torchs_ddp() -> None:
    source = inspect.getsource(DistributedDataParallel)
    for name in ("_use_python_reducer", "_delay_all_reduce_params", "mixed_precision", "parameters_to_ignore"):
        assert f"self.{name}" in source
    rebuild = source.index(
        "torch.is_grad_enabled() and self.reducer._rebuild_buckets()"
    )  # `check_reduced` does the same
    assert rebuild < source.index("self._has_rebuilt_buckets = True") < source.index("if self._check_sync_bufs_pre_fwd")
    assert "len(self.modules_buffers) > 0" in source
    assert "self.module(*inputs" in source, "DDP no longer calls `self.module`, which the shadow stands in for"
    assert callable(torch.distributed._broadcast_coalesced)
    assert isinstance(torch.distributed.distributed_c10d._world.pg_map, dict)
    model: Any = torch.nn.Module()
    model.module = torch.nn.Identity()
    torch_compat.wrap(model, other := torch.nn.Linear(1, 1))
    assert [*model.children()] == [model.module] == [other]


def test_torchs_buffers() -> None:
    module = torch.nn.Module()
    module.register_buffer("a", torch.ones(1), persistent=False)
    module.register_buffer("b", torch.ones(1))
    torch_compat.set_buffer(module, "a", torch.ones(2), persistent=True)
    torch_compat.set_buffer(module, "c", torch.ones(3), persistent=False)
    torch_compat.set_buffer(module, "b", None, persistent=True)
    assert [(name, len(buffer)) for name, buffer in module.named_buffers()] == [("a", 2), ("c", 3)]
    assert [torch_compat.is_persistent(module, name) for name in "abc"] == [True, True, False]


def test_torchs_reducer() -> None:
    for name in ("_check_reducer_finalized", "_get_local_used_map", "_rebuild_buckets"):
        assert callable(getattr(torch.distributed.Reducer, name))
    source = inspect.getsource(DistributedDataParallel)
    assert "self._comm_hooks.append((hook, state))" in source
    assert "self.find_unused_parameters and not self.static_graph" in source
    assert PostLocalSGDState.__name__ == "PostLocalSGDState"
    x = torch.ones(1, requires_grad=True)
    y = x * 1
    assert torch_compat.differentiable({"a": torch.ones(1), "b": [x, y]})[0] is y
    assert torch_compat.differentiable({"a": torch.ones(1)}) == []
    assert [None if n is None else n.item() for n in torch_compat.norms([torch.full((3,), -2.0), None])] == [6.0, None]


def test_dynamo_tells_whether_something_is_compiled() -> None:
    assert torch_compat.compiles_frames() is None
    found = []

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        note()
        return x + 1

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def note() -> None:
        found.append(torch_compat.compiles_frames() is None)

    compiled(torch.ones(1))
    assert found == [False]
    assert torch_compat.compiles_frames() is None


def test_torch_tells_which_gradients_a_backward_adds_to() -> None:
    x, y = (torch.ones(1, requires_grad=True) for _ in range(2))
    seen = []

    def note(_: torch.Tensor) -> None:
        seen.append((torch_compat.will_accumulate(x), torch_compat.will_accumulate(y)))

    def product() -> torch.Tensor:
        out = x * 2
        out.register_hook(note)
        return (out * y).sum() if not seen else out.sum()

    product().backward()
    product().backward()
    torch.autograd.grad(product(), x)
    assert seen == [(True, True), (True, False), (False, False)]


def test_torchs_join_config() -> None:
    disabled = torch_compat.disabled_join_config()
    assert (disabled.enable, disabled.is_first_joinable, disabled.throw_on_early_termination) == (False, False, False)
    assert {*disabled._fields} == {"enable", "throw_on_early_termination", "is_first_joinable"}
    source = inspect.getsource(TorchJoin.notify_join_context)
    assert "joinable._join_config" in source
    assert source.index("is_first_joinable") < source.index("dist.all_reduce")


@pytest.mark.parametrize(
    ("register", "hooks_of"),
    [
        ("register_hook", torch_compat.backward_hooks),
        ("register_post_accumulate_grad_hook", torch_compat.post_accumulate_hooks),
    ],
)
def test_torchs_hooks_live_in_a_dictionary_that_autograd_reads(register: str, hooks_of: Any) -> None:
    parameter = torch.ones(1, requires_grad=True)
    assert hooks_of(parameter) == {}
    seen: list[int] = []
    getattr(parameter, register)(lambda _: seen.append(1))
    hooks = hooks_of(parameter)
    kept = dict(hooks)
    hooks.clear()
    parameter.sum().backward()
    assert seen == []
    hooks.update(kept)
    parameter.sum().backward()
    assert seen == [1]


def test_torch_configures_joinables_after_it_has_asked_for_their_hooks() -> None:
    source = inspect.getsource(TorchJoin.__init__)
    assert source.index("join_hook(") < source.index("self._set_joinable_configs()")
    assert "joinable._join_config = _JoinConfig(" in inspect.getsource(TorchJoin._set_joinable_configs)
    # A word has the form of torch's count.
    assert "torch.zeros(1, device=self._device)" in inspect.getsource(TorchJoin._get_num_nonjoined_procs)
