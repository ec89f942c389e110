"""Notices when a private name that we rely on goes; the behaviour behind it is tested elsewhere."""

import inspect
import re

import accelerate
from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState, PartialState
from accelerate.utils import operations


def test_accelerates_prepared_things() -> None:
    source = inspect.getsource(accelerate.Accelerator.__init__)
    for name in ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "step", "scaler"):
        assert re.search(rf"self\.{name}\b", source), name
    assert "self._is_overflow" in inspect.getsource(AcceleratedOptimizer)
    prepare = inspect.getsource(accelerate.Accelerator.prepare_model)
    assert prepare.index("self._models.append(model)") < prepare.index("DistributedDataParallel("), (
        "it keeps inner modules"
    )


def test_accelerates_operations() -> None:
    for name in ("gather", "gather_object", "broadcast"):
        assert f"_gpu_{name}(" in inspect.getsource(inspect.unwrap(getattr(operations, name)))
    assert operations.reduce.__code__.co_freevars == ("function",)
    assert operations.reduce.__closure__[0].cell_contents is operations.reduce.__wrapped__
    assert "_gpu_gather" in operations.pad_across_processes.__globals__
    state = inspect.getsource(PartialState)
    for name in ("process_index", "local_process_index"):
        assert f"return self.{name} == 0" in state or f"self.{name} == 0" in state


def test_accelerates_loaders() -> None:
    for kind in (DataLoaderShard, DataLoaderDispatcher):
        source = inspect.getsource(kind.__iter__)
        assert source.index("self.end_of_dataloader = True") < source.rindex("yield")
        assert "self.iteration += 1" in source
    assert "__iter__" in vars(SkipDataLoader)
    assert "self.dl_state_dict = " in inspect.getsource(DataLoaderAdapter)
    for name in ("end_of_dataloader", "remainder"):
        assert isinstance(vars(GradientState)[name], property)
