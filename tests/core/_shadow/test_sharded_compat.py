"""What following a sharded model relies on in torch, what it leaves behind, and who imports it."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import device_mesh
from torch.distributed.fsdp import _runtime_utils
from torch.nn.utils import clip_grad

from tests.support.front_ends.sharded import PATIENCE, Training
from tests.support.sharded import Recipe
from tests.support.workers import Workers
from torch_join import UnsupportedError
from torch_join._compat.fsdp import check_runs, param_groups

ROOT = Path(__file__).parents[3]
SHADOWS = ROOT / "torch_join" / "_shadow" / "_sharded"
# The names that `torch_join/_shadow/_sharded/` uses, by what has them.
STATE = ["_lazy_init"]
GROUP = [
    *("mesh_info", "is_sharded", "is_unsharded", "fsdp_params", "reduce_grads", "all_reduce_grads", "comm_ctx"),
    *("reshard_after_backward", "unshard_in_backward", "_to_sharded", "pre_backward"),
    *("_record_post_forward", "_wait_all_gather_streams_on_event", "_post_forward_indices", "_all_gather_result"),
    *("_to_sharded_post_forward", "_training_state", "_reshard_after_forward", "_use_post_forward_mesh", "unshard"),
    *("post_backward", "wait_for_unshard", "use_training_state", "finalize_backward", "device_handle"),
]
CONTEXT = [
    *("device_handle", "all_gather_copy_in_stream", "all_gather_stream", "post_forward_order"),
    "all_gather_state",
]
# Of these one is there: the first from some version on, else the second.
EITHER = {
    "FSDPState": [("_fsdp_param_groups", "_fsdp_param_group")],
    "FSDPParamGroup": [("_all_gather_comm", "unshard_in_backward")],
    "FSDPCommContext": [("reduce_scatter_states", "reduce_scatter_state")],
}
PARAM = [
    *("sharded_param", "_unsharded_param", "all_gather_outputs", "unsharded_accumulated_grad"),
    "to_accumulated_grad_if_needed",
]
WRAPPER = [
    *("_handle", "_sync_gradients", "_is_root", "_device_handle", "_post_backward_stream", "_all_reduce_stream"),
    *("cpu_offload", "training_state", "_exec_order_data", "_comm_hook"),
]
HANDLE = [
    *("_all_gather_flat_param", "reshard", "prepare_gradient_for_backward", "prepare_gradient_for_optim"),
    *("needs_unshard", "uses_sharded_strategy", "_training_state", "_use_orig_params", "_skip_writeback_check"),
    *("_writeback_orig_params", "_offload_params", "_has_optim_in_backward", "_reset_flat_param_grad_info_if_needed"),
    *("_use_sharded_grad_views", "_post_forward_index", "_pre_forward_order_index"),
    *("_sharding_strategy", "process_group", "world_size", "device", "flat_param"),
]
FLAT = [
    *("_params", "_shared_params", "_full_param_padded", "_local_shard", "_unpadded_unsharded_size"),
    *("_shard_param_infos", "_is_grad_none_mask", "_tensors"),
]
ORDER = ["_iter", "handles_pre_forward_order", "handles_post_forward_order"]
RUNTIME = ["_lazy_init", "_reduce_grad", "_reduce_grad_no_shard", "_unshard", "_reshard", "_should_free_in_backward"]
CLIPPING = ["_get_total_norm", "_clip_grads_with_norm_"]
# What is there at times only, of a mesh or a tensor, or set.
OTHERS = [
    "_cpu_grad",
    "_saved_grad_shard",
    "_inter_node_pg",
    "_post_backward_called",
    "_local_tensor",
    "_get_fsdp_state",
    "_mesh_resources",
]


def lacking(rank: int) -> list[str]:
    second, first = Training(rank, Recipe()), Training(rank, Recipe(api="fsdp1"))
    for training in (second, first):
        training.step(0, 0, Recipe().batches(0, 0)[0])
    state = second.model._get_fsdp_state()
    (group,) = param_groups(second.model)
    wrapper = first.model
    table = [
        *((state, name) for name in STATE),
        *((group, name) for name in GROUP),
        *((group.comm_ctx, name) for name in CONTEXT),
        *((group.fsdp_params[0], name) for name in PARAM),
        *((wrapper, name) for name in WRAPPER),
        *((wrapper._handle, name) for name in HANDLE),
        *((wrapper._handle.flat_param, name) for name in FLAT),
        *((wrapper._exec_order_data, name) for name in ORDER),
    ]
    for thing in (state, group, group.comm_ctx):
        for newer, older in EITHER[type(thing).__name__]:
            table.append((thing, newer if hasattr(thing, newer) else older))
    return [f"{type(thing).__name__}.{name}" for thing, name in table if not hasattr(thing, name)]


def test_private_names_are_there(workers: Workers) -> None:
    assert workers.run(2, lacking, **PATIENCE) == [[], []]
    assert [name for name in RUNTIME if not hasattr(_runtime_utils, name)] == []
    assert [name for name in CLIPPING if not hasattr(clip_grad, name)] == []
    assert hasattr(device_mesh.DeviceMesh, "_get_root_mesh") or hasattr(device_mesh._mesh_resources, "get_root_mesh")


def private_names(source: str) -> set[str]:
    """Return the private names of other objects than `self`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }


def test_all_private_names_are_in_the_table() -> None:
    known = {*STATE, *GROUP, *CONTEXT, *PARAM, *WRAPPER, *HANDLE, *FLAT, *ORDER, *RUNTIME, *CLIPPING, *OTHERS}
    known |= {name for pairs in EITHER.values() for pair in pairs for name in pair}
    for path in SHADOWS.glob("*.py"):
        assert private_names(path.read_text()) - known == set(), path
    assert private_names("handle._new, self._own") == {"_new"}


# ------------------------------------------------------------ what is left behind


class UserError(Exception):
    pass


class Failing(Training):
    def update(self, epoch: int, step: int) -> None:
        if step == 3:
            raise UserError("in the tail")
        super().update(epoch, step)


def replaced(training: Training) -> list[Any]:
    """Return what following a model replaces: by identity, but for the names of attributes."""
    found: list[Any] = [getattr(clip_grad, name) for name in CLIPPING]
    found += [getattr(_runtime_utils, name) for name in RUNTIME]
    for module in training.model.modules():
        found.append(len(module._forward_pre_hooks))
        found.append("clip_grad_norm_" in vars(module))
        if hasattr(module, "_get_fsdp_state"):
            for group in param_groups(module):
                found.append(getattr(group, "_all_gather_comm", None))
                found += [name in vars(group) for name in GROUP]
        if (handle := getattr(module, "_handle", None)) is not None:
            found += [name in vars(handle) for name in HANDLE]
            found.append(len(handle.flat_param._backward_hooks or ()))
    if training.scaler is not None:
        found += [name in vars(training.scaler) for name in ("unscale_", "update")]
    found += ["zero_grad" in vars(training.optimizer), len(training.optimizer._optimizer_step_pre_hooks)]
    found += [len(training.optimizer._optimizer_step_post_hooks)]
    return found


def train_and_look(rank: int, api: str, fails: bool) -> list[tuple[Any, Any]]:
    recipe = Recipe((2, 5), api=api, scaler=1024.0, clip=0.3, dtype=torch.float32, weighting="samples", may_break=True)
    training = (Failing if fails else Training)(rank, recipe)
    training.step(0, 0, recipe.batches(0, 0)[0])  # FSDP makes what it makes later
    before = replaced(training)
    try:
        training.run_epochs()
    except Exception as error:
        if "UserError" not in repr(error) + str(error):
            raise
    after = replaced(training)
    return [(str(b), str(a)) for b, a in zip(before, after, strict=True) if b is not a and b != a]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_nothing_is_left_behind(workers: Workers, api: str, fails: bool) -> None:
    assert workers.run(2, train_and_look, api, fails, **PATIENCE) == [[], []]


# ------------------------------------------------------------ imports

PROGRAM = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torch_join, torch_join.integration
print('torch.distributed.fsdp' in sys.modules)  # torch imports it when it makes an optimizer
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch_join.Join([model, optimizer]) as join:
    for x in join.batches([torch.ones(1, 2)] * 2):
        model(x).sum().backward()
        optimizer.step()
{more}
print([name for name in sys.modules if name.startswith("torch_join") and ("sharded" in name or "fsdp" in name)])
"""


def imported(more: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(more=more)], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_program_with_replicas_imports_nothing_of_it() -> None:
    assert imported() == ["False", "[]"]


def test_the_test_above_can_fail() -> None:
    assert "_sharded" in imported("import torch_join._participants._sharded.make_sharded")[1]


def test_fully_shard_is_refused_where_torch_cannot_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(device=torch.device("cpu"))
    check_runs(group, "layer")
    monkeypatch.setattr(torch.cpu, "Stream", object)  # as before it had events
    with pytest.raises(UnsupportedError, match="layer is sharded by fully_shard on the CPU, which torch"):
        check_runs(group, "layer")
    check_runs(SimpleNamespace(device=torch.device("cuda")), "layer")
