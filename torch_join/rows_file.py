"""Rows of all ranks in one file, in order, written and read in bounded memory.

Each rank appends its rows to its own file, beside the final one. At the end, rank 0 reads these files and writes all
rows in order, so all ranks need the same file system.

The final file starts with a line that names the format. Then come the rows of each dataset; if their sizes differ, a
table of where each row starts follows them. The file ends with a pickled list of `_Section`, one per dataset, and the
position of that list. A row is its tensors' bytes and, if the structure has lists, one pickle of its objects.
"""

import os
import pickle
import struct
import uuid
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.errors import JoinError, JoinValueError
from torch_join._base.rows import Leaf, Rows, build, check_alike, leaves, split
from torch_join._base.specs import copied_bytes, raw_bytes
from torch_join._handover import objects as _objects
from torch_join.gather_in_order import place_rows

_MAGIC = b"torch_join rows, version 1\n"
_END = struct.Struct("<q")
_AT_ONCE = 1 << 26  # bytes that rank 0 copies before it reports to the other ranks
_READ_AT_ONCE = 1 << 24
_ROWS_AT_ONCE = 1 << 16
_BUFFER = 1 << 20


@dataclass
class _Section:
    """The rows of one dataset.

    Attributes:
        tree: Their structure; `None` if there are no rows.
        count: The number of rows.
        begin: The position of the first row.
        size: The size of all rows in bytes.
        row_bytes: The size of each row in bytes; `None` if sizes differ.
        table: The position of the table, which holds the start of each row and the end of the last one.
    """

    tree: Any = None
    count: int = 0
    begin: int = 0
    size: int = 0
    row_bytes: int | None = None
    table: int = 0


@dataclass
class _Written:
    """The rows of one dataset that a rank has written.

    Attributes:
        tree: Their structure.
        begins: Where each row starts in the rank's file.
        ends: Where each row ends.
        indices: The indices of the samples.
        has_indices: Whether all indices are known.
    """

    tree: Any = None
    begins: "array[int]" = field(default_factory=lambda: array("q"))
    ends: "array[int]" = field(default_factory=lambda: array("q"))
    indices: "array[int]" = field(default_factory=lambda: array("q"))
    has_indices: bool = True


class RowsPart:
    """One rank's part of the rows, in its own file.

    Args:
        path: The path of the final file.
        rank: This rank.
        datasets: The number of datasets.
        what: The name of a structure in errors.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int, datasets: int, what: str = "rows") -> None:
        self._path, self._rank, self._what = Path(path), rank, what
        self._name = uuid.uuid4().hex  # so that rank 0 does not mistake another or an older file for this one
        self._written = [_Written() for _ in range(datasets)]
        self._own_path = _path_of(self._path, rank)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(self._own_path, "wb", buffering=_BUFFER)  # noqa: SIM115  closed in `finish`
        self._at = 0

    @torch.no_grad()
    def append(self, dataset: int, structure: Any, indices: Sequence[int] | None) -> None:
        """Append the rows of a batch.

        Args:
            dataset: The number of its dataset.
            structure: A structure as for `gather_in_order`, on the CPU.
            indices: The indices of the samples, if known.

        Raises:
            JoinError: A part of the structure lacks a row for some sample, or differs from the first batch.
        """
        rows, written = split(structure, self._what, None if indices is None else len(indices)), self._written[dataset]
        if written.tree is None:
            written.tree = rows.tree
        check_alike(written.tree, rows.tree, ["the first batch", "this one"])
        written.has_indices = written.has_indices and indices is not None
        written.indices.extend(indices or ())
        for data, sizes in _encode(rows):
            self._file.write(data)
            for size in sizes:
                written.begins.append(self._at)
                self._at += size
                written.ends.append(self._at)

    def finish(self, by_rank: Sequence[bool], group: dist.ProcessGroup | None = None) -> None:
        """Write all ranks' rows to one file; all ranks call this.

        Args:
            by_rank: For each dataset, `by_rank` of `gather_in_order`.
            group: The process group, by default the whole world.

        Raises:
            JoinError: On all ranks, if the file cannot be written.
        """
        try:
            answers = _objects.gather((self._close(), self._name), "What a rank has written", group)
            for rank, (error, _) in enumerate(answers):
                if error:
                    raise JoinError(f"Rank {rank} could not write its {self._what} to {self._path}: {error}")
            steps = _merge(self._path, [name for _, name in answers], by_rank)
            # In pieces, so that no rank waits for long without a report from rank 0.
            while (state := _objects.gather("" if self._rank else _advance(steps), "An error", group)[0]) is not None:
                if state:
                    raise JoinError(f"Rank 0 could not write the {self._what} to {self._path}: {state}")
        finally:
            self.abandon()

    def _close(self) -> str:
        """End this rank's file; return the error, if any."""
        try:
            self._file.write(pickle.dumps((self._name, self._written)))
            self._file.write(_END.pack(self._at))
            self._file.close()
        except Exception as error:  # the other ranks wait for a message, so they get the error
            return repr(error)
        return ""

    def abandon(self) -> None:
        """Remove this rank's own file; a second call does nothing."""
        self._file.close()
        self._own_path.unlink(missing_ok=True)


def _path_of(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}")


# ---------------------------------------------------------------- rows as bytes


def _encode(rows: Rows) -> Iterator[tuple[bytes, Sequence[int]]]:
    """Yield pieces of bytes, each with the sizes of its rows."""
    tensors, lists = _kinds(rows.tree)
    parts = [raw_bytes(rows.values[leaf.path]).view(rows.count, leaf.row_bytes) for leaf in tensors]
    data = copied_bytes(torch.cat(parts, dim=1)) if parts else b""
    width = sum(leaf.row_bytes for leaf in tensors)
    if not lists:
        yield data, [width] * rows.count
        return
    for row in range(rows.count):
        objects = pickle.dumps([rows.values[leaf.path][row] for leaf in lists])
        yield data[row * width : (row + 1) * width] + objects, [width + len(objects)]


def _decode(tree: Any, data: Sequence[bytes]) -> Any:
    """Rebuild a structure from the bytes of some rows."""
    tensors, lists = _kinds(tree)
    width = sum(leaf.row_bytes for leaf in tensors)
    joined = bytearray().join(row[:width] for row in data) if lists else bytearray().join(data)
    whole = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    count = len(data) if lists or width == 0 else len(joined) // width
    columns = torch.split(whole.view(count, width), [leaf.row_bytes for leaf in tensors], dim=1)
    values: dict[str, Any] = {}
    for leaf, part in zip(tensors, columns, strict=True):
        assert leaf.dtype is not None
        own = part.clone(memory_format=torch.contiguous_format)  # new memory, so that it is aligned for its dtype
        values[leaf.path] = own.flatten().view(leaf.dtype).view(count, *leaf.shape)
    objects = [pickle.loads(row[width:]) for row in data] if lists else []
    values |= {leaf.path: [row[place] for row in objects] for place, leaf in enumerate(lists)}
    return build(tree, values)


def _kinds(tree: Any) -> tuple[list[Leaf], list[Leaf]]:
    everything = leaves(tree)
    return [leaf for leaf in everything if leaf.dtype is not None], [leaf for leaf in everything if leaf.dtype is None]


# ---------------------------------------------------------------- on rank 0, at the end


def _advance(steps: Iterator[None]) -> str | None:
    """Write the next piece; return an empty text, the error's text, or `None` at the end."""
    try:
        next(steps)
    except StopIteration:
        return None
    except Exception as error:
        return str(error) if isinstance(error, JoinError) else repr(error)
    return ""


def _merge(path: Path, names: Sequence[str], by_rank: Sequence[bool]) -> Iterator[None]:
    """Write all rows, one piece per step."""
    new = path.with_name(f"{path.name}.new")
    files, written = [], []
    try:
        with ExitStack() as stack:
            stack.callback(new.unlink, missing_ok=True)
            for rank, name in enumerate(names):
                files.append(stack.enter_context(open(_path_of(path, rank), "rb", buffering=_BUFFER)))
                written_name, of_rank = _read_end(files[-1])
                if written_name != name:
                    raise JoinValueError(
                        f"{files[-1].name} is not the file that rank {rank} wrote. Use a file system that all ranks"
                        " share."
                    )
                written.append(of_rank)
            with open(new, "wb", buffering=_BUFFER) as out:
                out.write(_MAGIC)
                sections = []
                for number, way in enumerate(by_rank):
                    section = _Section(begin=out.tell())
                    yield from _write_section(out, section, files, [of_rank[number] for of_rank in written], way)
                    sections.append(section)
                end = out.tell()
                out.write(pickle.dumps(sections))
                out.write(_END.pack(end))
            os.replace(new, path)
    except FileNotFoundError as error:
        raise JoinValueError(f"{error.filename} does not exist. Use a file system that all ranks share.") from error


def _write_section(
    out: BinaryIO, section: _Section, files: Sequence[BinaryIO], written: Sequence[_Written], by_rank: bool
) -> Iterator[None]:
    nonempty = [rank for rank, each in enumerate(written) if each.tree is not None]
    if not nonempty:
        return
    section.tree = written[nonempty[0]].tree
    for rank in nonempty:
        check_alike(section.tree, written[rank].tree, [f"rank {nonempty[0]}", f"rank {rank}"])
    indices = [_as_tensor(each.indices) for each in written] if all(each.has_indices for each in written) else None
    places, section.count = place_rows([len(each.begins) for each in written], indices, by_rank)
    if not _kinds(section.tree)[1]:
        section.row_bytes = sum(leaf.row_bytes for leaf in leaves(section.tree))
    ends = array("q", [out.tell()])
    copied = 0
    for rank, begin, end in _in_order(places, section.count, written):
        files[rank].seek(begin)
        while begin < end:
            size = min(end - begin, _AT_ONCE)
            out.write(files[rank].read(size))
            begin, copied = begin + size, copied + size
            if copied >= _AT_ONCE:
                copied = 0
                yield
        if section.row_bytes is None:
            ends.append(out.tell())
    section.size = out.tell() - section.begin
    if section.row_bytes is None:
        section.table = out.tell()
        out.write(ends.tobytes())


def _in_order(places: Sequence[Tensor], count: int, written: Sequence[_Written]) -> Iterator[tuple[int, int, int]]:
    """Yield, in order, the rank whose file has each row, and the row's start and end in it."""
    source = torch.empty((count, 3), dtype=torch.int64, device="cpu")
    for rank, (at, of_rank) in enumerate(zip(places, written, strict=True)):
        kept = at >= 0
        source[at[kept], 0] = rank
        source[at[kept], 1] = _as_tensor(of_rank.begins)[kept]
        source[at[kept], 2] = _as_tensor(of_rank.ends)[kept]
    for piece in torch.split(source, _ROWS_AT_ONCE):
        yield from piece.tolist()


def _as_tensor(numbers: "array[int]") -> Tensor:
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64, device="cpu")


def _read_end(file: BinaryIO) -> Any:
    file.seek(-_END.size, os.SEEK_END)
    end = file.tell()
    (begin,) = _END.unpack(file.read())
    file.seek(begin)
    return pickle.loads(file.read(end - begin))


# ---------------------------------------------------------------- reading


class FileRows(Sequence[Any]):
    """The rows of one dataset in a file, in order; each is read when it is accessed.

    `rows[i]` holds one sample: its row from each tensor, and its object from each list. `rows[i:j]` is a structure
    like that of a batch, and `rows[:]` holds all samples, or is `None` if there are none. Iterating yields samples.

    Args:
        path: The path of the file.
        section: The section with the rows.
    """

    def __init__(self, path: Path, section: Any) -> None:
        self._path, self._section = path, section

    def __len__(self) -> int:
        return self._section.count  # type: ignore[no-any-return]

    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, slice):
            row = self[range(len(self))[at] : range(len(self))[at] + 1]
            return _sample_of(self._section.tree, row)
        first, last, step = at.indices(len(self))
        if step != 1:
            raise JoinValueError(f"Rows can only be sliced with a step of 1, not {step}.")
        section: _Section = self._section
        if section.tree is None:
            return None
        last = max(first, last)
        with open(self._path, "rb") as file:
            if section.row_bytes is not None:
                file.seek(section.begin + first * section.row_bytes)
                data = file.read((last - first) * section.row_bytes)
                return _decode(section.tree, [data] if section.row_bytes else [b""] * (last - first))
            file.seek(section.table + 8 * first)
            ends = array("q", file.read(8 * (last - first + 1)))
            file.seek(ends[0])
            data = file.read(ends[-1] - ends[0])
        return _decode(section.tree, [data[a - ends[0] : b - ends[0]] for a, b in pairwise(ends)])

    def __iter__(self) -> Iterator[Any]:
        at_once = max(1, min(256, _READ_AT_ONCE * len(self) // max(1, self._section.size)))
        for first in range(0, len(self), at_once):
            rows = self[first : first + at_once]
            yield from (_sample_of(self._section.tree, rows, row) for row in range(min(at_once, len(self) - first)))


def _sample_of(tree: Any, rows: Any, row: int = 0) -> Any:
    found = split(rows)
    own = {leaf.path: value[row] for leaf, value in zip(leaves(tree), found.values.values(), strict=True)}
    return build(tree, own)


def read_rows(path: str | os.PathLike[str]) -> list[FileRows]:
    """Return the rows of each dataset in a file.

    Raises:
        JoinValueError: The file has another format.
    """
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise JoinValueError(f"{path} is not a rows file that this version of torch_join can read.")
        sections = _read_end(file)
    return [FileRows(Path(path), section) for section in sections]
