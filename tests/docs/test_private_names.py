"""The lists of private names on the page "What is patched" are those that the packages check, and import."""

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.docs.snippets import DOCS

pytest.importorskip("docutils")


@pytest.fixture(scope="module")
def directive() -> ModuleType:
    spec = importlib.util.spec_from_file_location("private_names", DOCS / "_ext" / "private_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_has_a_list_for_each_framework(directive: ModuleType) -> None:
    frameworks = {each[0] for path in directive.modules() for each in directive.private_names(path)}
    page = (DOCS / "what-is-patched.md").read_text()
    assert frameworks == {line.split()[1] for line in page.splitlines() if line.startswith("```{private-names}")}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("torch_join/_compat/ddp.py", ("torch", "DistributedDataParallel", "_comm_hooks")),
        ("torch_join/_compat/fsdp.py", ("torch", "torch.distributed.fsdp._flat_param", "FlatParamHandle")),
        ("lightning_join/_compat.py", ("lightning", "lightning.pytorch.loops", "_FitLoop")),
        # That one is made of a constant.
        ("torch_join/_compat/deepspeed.py", ("deepspeed", "DeepSpeedZeRoOffload", "pre_sub_module_forward_function")),
    ],
)
def test_names_that_are_checked_or_imported_are_listed(
    directive: ModuleType, path: str, name: tuple[str, str, str]
) -> None:
    assert name in [*directive.private_names(DOCS.parent / path)]
