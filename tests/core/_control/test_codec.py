"""What messages are made of: every kind comes back as it was, and nothing else is taken for a message."""

import ast
import contextlib
import json
import math
import pickle
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_join
from tests.support.inside import REVIVERS, dtypes
from torch_join import JoinError, JoinTypeError
from torch_join._base.hyperparameters import take_group_options
from torch_join._collectives.call import Call, TensorSpec
from torch_join._control import codec as _codec
from torch_join._control.codec import Malformed, check, decode, encode, is_closed
from torch_join._control.reports import Status
from torch_join._handover.mirror import Changes
from torch_join._participants._gradients.evidence import CLEARED, FULL, KEPT, NONE, Runs, State, runs_of, states_of

CALL = Call(
    "all_reduce",
    "0",
    inputs=(TensorSpec(torch.float32, (3, 4)), TensorSpec(torch.bfloat16, (), None)),
    outputs=(TensorSpec(torch.int64, (2,), 1),),
    reduce_op="SUM",
    root=None,
    timeout=1.5,
)
RUN: list[str] = []


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return RUN.append, ("code",)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        return alike and bool(((one == other) | (one != one)).all())
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) for pairs in zip(one.items(), other.items(), strict=True) for a, b in zip(*pairs, strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(2**70), 1.5, -0.0, float("nan"), float("inf"), -float("inf"), "", "\ud800 ü \x00", 2 - 3j),
        *([], (), {}, [1, (2, [3, None])], {1: "a", None: 2, (1, "x"): {}, "t": 3}, {"t": []}),
        *(torch.float8_e4m3fn, torch.device("cuda:3"), torch.Size([2, 0])),
        *(torch.tensor(0.1), torch.tensor(True), torch.tensor(7, dtype=torch.int8), torch.tensor(1e-3).bfloat16()),
        *(CALL, Status([[1, 2]], (3, 4, "x")), Status([]), Changes([1], [], [2, 3], [])),
    ],
    ids=repr,
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert same(decode(encode(value)), value)
    assert is_closed(value)


def make(random: random.Random, depth: int = 0) -> Any:
    simple = [
        lambda: random.choice([None, True, False, "", "t", "é\u2028", math.inf, math.nan, -0.0]),
        lambda: random.randint(-(2**66), 2**66),
        lambda: random.uniform(-1, 1) * 10 ** random.randint(-300, 300),
        lambda: random.choice([torch.float64, torch.bool, torch.complex64, torch.device("cpu"), CALL]),
        lambda: torch.tensor(random.random(), dtype=random.choice([torch.float64, torch.float16])),
    ]
    if depth > 3 or random.random() < 0.5:
        return random.choice(simple)()
    several = [make(random, depth + 1) for _ in range(random.randint(0, 4))]
    if random.random() < 0.6:
        return random.choice([list, tuple])(several)
    return {random.choice([i, str(i), (i, None), float(i)]): value for i, value in enumerate(several)}


def test_random_values_come_back_as_they_were() -> None:
    source = random.Random(0)
    for _ in range(2000):
        value = make(source)
        assert same(decode(encode(value)), value), value


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Evil(), "test_codec.Evil"),
        ([{"a": object}], "builtins.type"),
        ({1, 2}, "builtins.set"),
        (b"x", "builtins.bytes"),
        (torch.ones(2), "torch.Tensor"),
        (torch.ones((), requires_grad=True), "torch.Tensor"),
        (torch.nn.Parameter(torch.ones(())), "torch.nn.parameter.Parameter"),
        (json.JSONDecoder, "builtins.type"),
        ("x" * _codec.MAX_BYTES, "too large"),
    ],
)
def test_an_unknown_kind_is_refused_by_name(value: Any, named: str) -> None:
    assert not is_closed(value)
    with pytest.raises(JoinTypeError, match=named):
        encode(value)


def test_what_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(JoinTypeError, match="cannot be sent"):
        encode(endless)


GARBAGE = [
    pickle.dumps(Evil()),
    pickle.dumps([1]),
    b"",
    b"x",
    b"failed2",
    b"\xff\xfe[\x00]\x00",
    b"[1",
    b"[" * 100_000,
    b'{"t":' * 5000,
    b'{"t":1}',
    b"{}",
    b'{"t":[],"d":[]}',
    b'{"call":[]}',
    b'{"evil":[]}',
    b'{"__reduce__":["os.system",["true"]]}',
    b'{"d":[[1]]}',
    b'{"d":[[[],1]]}',
    b'{"d":[[1,2,3]]}',
    b'{"dtype":"nn"}',
    b'{"dtype":[]}',
    b'{"device":"nowhere"}',
    b'{"device":{"t":[]}}',
    b'{"device":1}',
    b'{"size":["x"]}',
    b'{"size":[-1]}',
    b'{"size":[100000000000000000000]}',
    b'{"scalar":["float32","1"]}',
    b'{"scalar":["int8",1e400]}',
    b'{"scalar":["int8",100000000000000000000]}',
    b'{"scalar":["uint8",1,"hpu"]}',
    b'{"scalar":["uint8",1,"cuda"]}',
    b'{"complex":[1]}',
    b"1" * 5000,
    b" " * (_codec.MAX_BYTES + 1),
]


@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: repr(data[:40]))
def test_garbage_is_refused(data: bytes) -> None:
    RUN.clear()
    with pytest.raises(Malformed):
        decode(data)
    assert RUN == []


def strange(random: random.Random, depth: int = 5) -> Any:
    """Return JSON of all kinds, with contents that torch has been seen to choke on."""
    kind = random.randrange(12)
    if kind < 6 or depth == 0:
        names = ["x", "", "float32", "qint8", "bits8", "complex32", "meta", "cuda:99", "hpu:0", "privateuseone", "xla"]
        return random.choice([None, True, 1, -1, 1.5, math.nan, math.inf, 10**300, -(10**30), "\ud800", [], *names])
    several = [strange(random, depth - 1) for _ in range(random.randrange(6))]
    if kind < 8:
        return several
    tag = random.choice([*REVIVERS])
    return {tag: several if random.random() < 0.8 else strange(random, depth - 1)}


def strangers() -> Iterator[bytes]:
    source = random.Random(0)
    for _ in range(4000):
        yield json.dumps(strange(source)).encode()
    for depth in range(300, 1000, 7):
        for begin, end in (("[", "]"), ('{"t":[', "]}"), ('{"d":[[1,', "]]}")):
            yield (begin * depth + "1" + end * depth).encode()
    devices = ["cpu", "meta", "cuda", "cuda:-1", "xpu", "mps", "hpu", "xla", "lazy", "mkldnn", "maia", "privateuseone"]
    for dtype in dtypes():
        for value in ("1", "1.5", "true", '{"complex":[1,2]}', "1e400", str(10**30)):
            yield f'{{"scalar":["{dtype}",{value}]}}'.encode()
            for device in devices:
                yield f'{{"scalar":["{dtype}",{value},"{device}"]}}'.encode()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of dtypes and devices that are going
def test_whatever_a_stranger_writes_is_a_value_or_malformed() -> None:
    types = [tuple[list[tuple[int, str, Any]], tuple[int, ...]], int, Status, Call, dict[str, str]]
    for number, data in enumerate(strangers()):
        with contextlib.suppress(Malformed):
            decode(data, Any if number % 2 else types[number % len(types)])
    assert not torch.cuda.is_initialized()


def test_a_long_shape_takes_no_time() -> None:
    """Its product took seconds, in which no other thread of the process runs."""
    length = "9" * 4290
    for many in (60, 200, 2000):
        shape = ",".join([length] * many)
        start = time.monotonic()
        with pytest.raises(Malformed):
            decode(f'{{"stand-in":[{{"dtype":"float32"}},{{"t":[{shape}]}},null]}}'.encode())
        assert time.monotonic() - start < 0.1 + len(shape) * 5e-7


def test_a_tensor_comes_to_the_device_of_the_one_that_it_replaces() -> None:
    group = {"lr": torch.zeros((), device="meta"), "eps": torch.zeros(()), "betas": 1, "new": None}
    values = {"lr": torch.tensor(0.1), "eps": 0.5, "betas": torch.tensor(2.0), "new": torch.tensor(3.0)}
    take_group_options(SimpleNamespace(param_groups=[group]), decode(encode([values])))
    assert group["lr"].is_meta  # type: ignore[union-attr]
    assert same([group["eps"], group["betas"], group["new"]], [0.5, torch.tensor(2.0), torch.tensor(3.0)])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("operation", "system"),
        ("operation", 1),
        ("group", None),
        ("device", "nowhere"),
        ("inputs", [1]),
        ("inputs", (1,)),
        ("reduce_op", "EVIL"),
        ("root", "0"),
        ("root", True),
        ("objects", -1),
        ("objects", 1 << 40),
        ("timeout", -1.0),
        ("timeout", math.nan),
        ("timeout", math.inf),
        ("wait_all_ranks", 1),
    ],
)
def test_a_collective_that_cannot_be_is_refused(field: str, value: Any) -> None:
    names = list(Call.__dataclass_fields__)
    fields = json.loads(encode(CALL))["call"]
    fields[names.index(field)] = json.loads(encode(value))
    with pytest.raises(Malformed):
        decode(json.dumps({"call": fields}).encode())


@pytest.mark.parametrize("shape", [(-1,), (1 << 41,), (1 << 21, 1 << 21), (1,) * 65, (1.0,), ("1",)])
def test_a_tensor_that_cannot_be_is_refused(shape: tuple[Any, ...]) -> None:
    with pytest.raises(Malformed):
        decode(encode(TensorSpec(torch.float32, shape)))


@pytest.mark.parametrize(
    ("value", "of", "fits"),
    [
        (1, int, True),
        (True, int, False),
        (1, float, True),
        (True, float, False),
        ([1, 2], list[int], True),
        ([1, True], list[int], False),
        ((1, 2), list[int], False),
        ((1, "x"), tuple[int, str], True),
        ((1,), tuple[int, str], False),
        ((1, 2, 3), tuple[int, ...], True),
        ({1: [True]}, dict[int, list[bool]], True),
        ({"1": [True]}, dict[int, list[bool]], False),
        (None, int | None, True),
        ("x", int | None, False),
        (CALL, Call, True),
        ([CALL], Call, False),
        (object(), Any, True),
    ],
)
def test_types_are_checked(value: Any, of: Any, fits: bool) -> None:
    if fits:
        assert check(value, of) is value
    else:
        with pytest.raises(Malformed, match="in place of"):
            check(value, of)


# ---------------------------------------------------------------- the source

UNPICKLERS = {"loads", "load", "Unpickler", "_unpickle", "eval", "exec", "marshal"}
# What comes over the process group only; see there.
ALLOWED = {
    ("objects.py", "pickle.loads"),
    ("state.py", "pickle.Unpickler"),
    # Batches, which travel over a process group, as torch's object collectives do.
    ("batch_exchange.py", "pickle.loads"),
    ("packing.py", "pickle.Unpickler"),
    ("gather_in_order.py", "pickle.loads"),
    # A file that the user's own ranks have written; see docs/lightning.md.
    ("rows_file.py", "pickle.loads"),
    # What torch's flight recorder says of this very process.
    ("whereabouts.py", "pickle.loads"),
}


def unpickling(path: Path) -> set[tuple[str, str]]:
    """Return where a file names something that runs what it reads."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = node.value.id, node.attr
            if (module in ("pickle", "marshal", "dill", "cloudpickle", "shelve") and name in UNPICKLERS) or (
                module == "torch" and name == "load"
            ):
                found.add((path.name, f"{module}.{name}"))
        elif isinstance(node, ast.Name) and node.id in ("eval", "exec", "__import__"):
            found.add((path.name, node.id))
        elif isinstance(node, ast.ImportFrom) and node.module in ("pickle", "marshal", "_pickle"):
            found.add((path.name, f"from {node.module}"))
    return found


def test_nothing_from_the_store_is_unpickled(tmp_path: Path) -> None:
    root = Path(torch_join.__file__).parent.parent
    files = [
        file
        for package in ("torch_join", "lightning_join", "accelerate_join")
        for file in root.glob(f"{package}/**/*.py")
    ]
    assert len(files) > 50
    assert {name for file in files for name in unpickling(file)} == ALLOWED
    # And this scan can fail.
    (tmp_path / "x.py").write_text("import pickle, torch\npickle.loads(b'')\ntorch.load('x')\neval('1')\n")
    assert len(unpickling(tmp_path / "x.py")) == 3


def test_what_unpickles_knows_no_store() -> None:
    for name in ("objects.py", "state.py"):
        text = (Path(torch_join.__file__).parent / "_handover" / name).read_text()
        assert "store" not in {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        assert "_channel" not in text
        assert "_control.channel" not in text


def test_states_of_gradients_go_as_runs() -> None:
    kept, cleared = State(KEPT, FULL, 0.5), State(CLEARED, NONE)
    states = [cleared] * 300 + [kept, State(KEPT, FULL, 0.25), cleared]
    data = encode(runs_of(states))
    assert len(data) < 250
    assert states_of(decode(data, Runs), len(states)) == states
    for runs in ([(cleared, 10**9)], [(cleared, 4), (kept, -1)], [(cleared, 3), (kept, 0)], [(cleared, 2)], []):
        with pytest.raises(JoinError, match="in place of those of 3 parameters"):
            states_of(runs, 3)
