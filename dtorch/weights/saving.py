"""Tensors from a mesh into standard safetensors files: each worker writes its own pieces in place, and nobody gathers."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from sys import _getframe
from typing import Any

import torch

from dtorch.blocking import check_loop
from dtorch.creation import zeros
from dtorch.face import TorchTensor
from dtorch.frames import source
from dtorch.mesh import DeviceMesh
from dtorch.placement import Replicate, Shard
from dtorch.runtime.files import FileAccess
from dtorch.runtime.kernels.file import write_box
from dtorch.runtime.safetensors import NAMES, Entry, build_header
from dtorch.runtime.signature import Signature
from dtorch.runtime.template import dtype_name
from dtorch.session import Session, current_session
from dtorch.spec import STALE, Spec
from dtorch.tensor import Tensor
from dtorch.transport.errors import DTorchError
from dtorch.transport.messages import Definition
from dtorch.weights.checkpoint import INDEX, index_files, shards
from dtorch.weights.progress import Progress

_new = object.__new__
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
STEM = "model"
"""The name of a checkpoint in a directory."""


def save_safetensors(
    tensors: torch.nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    progress: bool = True,
) -> Path:
    """Write tensors of any placement into a safetensors file that every reader of the format can read.

    Each worker writes the pieces of its devices to their places in the file; of copies, one is written. Nothing is
    gathered, and any mesh can load it again, bit by bit. The file takes its name once all is on disk; until then, and if
    anything fails, what was there before stays. Waits until it is done; in async code:
    ``await asyncio.to_thread(dtorch.save_safetensors, tensors, path)``.

    Args:
        tensors: name -> tensor (of either face, or plain), or a module: its parameters and the buffers that are saved.
            One tensor under several names is written once; the other names go into the file's metadata, as
            ``safetensors.torch.save_model`` does it.
        path: a ``.safetensors`` file; or a directory, which gets a ``model.safetensors``. Where workers run on other hosts,
            it must be a folder that all share.
        metadata: strings for the file's header; {"format": "pt"} is always there.
        max_shard_size: bytes, or such as "5GB". A larger checkpoint becomes several files and an index
            (``*.safetensors.index.json``).
        progress: show a bar, in a terminal or notebook, if it takes a while.

    Returns:
        The file or index that was written.

    Raises:
        ValueError: a tensor that the format cannot hold, or a path that is neither.
        OpError: a worker could not write, or a tensor's value is the result of an op that failed.
        OSError: the client could not write, such as for want of space.
    """
    given = dict(tensors.state_dict(keep_vars=True)) if isinstance(tensors, torch.nn.Module) else dict(tensors)
    kept, aliases = _distinct(given)
    folder, stem = _where(Path(path))
    most = _bytes(max_shard_size)
    groups = list(shards({name: _size_bytes(x) for name, x in kept.items()}, most))
    sessions = {x._spec.session: None for x in kept.values() if isinstance(x, Tensor)}
    for session in sessions:
        session.check_open()
    target = _Target(folder, stem, len(groups), next(iter(sessions), None))
    with Progress(sum(map(_size_bytes, kept.values())), "saving weights", progress) as bar, target:
        for number, names in enumerate(groups):
            extra = {"format": "pt", **(metadata or {})}
            extra.update({alias: name for alias, name in aliases.items() if name in names})
            _write({name: kept[name] for name in names}, extra, target.temporary(number), bar)
        return target.commit(groups, sum(map(_size_bytes, kept.values())))


def _distinct(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(name -> tensor, native or plain; further name -> first name of the same tensor)."""
    kept: dict[str, Any] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, value in given.items():
        x = value.native if isinstance(value, TorchTensor) else value
        if not isinstance(name, str) or not isinstance(x, (Tensor, torch.Tensor)):
            if isinstance(name, str) and name.endswith("_extra_state"):
                continue
            raise ValueError(f"save_safetensors: expected names and tensors, got {name!r}: {type(value).__name__}")
        if isinstance(x, torch.Tensor) and (x.is_meta or x.layout != torch.strided):
            what = "is on the meta device" if x.is_meta else f"has layout {x.layout}"
            raise ValueError(f"save_safetensors: {name!r} {what}; only dense tensors with values can be saved")
        if dtype_name(x.dtype) not in NAMES:
            raise ValueError(f"save_safetensors: {name!r} is {x.dtype}, which the format lacks; convert it before")
        if id(x) in first:
            aliases[name] = first[id(x)]
        else:
            first[id(x)] = name
            kept[name] = x
    return kept, aliases


def _size_bytes(x: Any) -> int:
    return int(x.numel() * x.element_size())


def _where(path: Path) -> tuple[Path, str]:
    """(folder, name without its ending)."""
    path = Path(os.path.abspath(path))
    for ending in (INDEX, ".safetensors"):
        if path.name.endswith(ending) and not path.is_dir():
            if not path.parent.is_dir():
                raise FileNotFoundError(f"save_safetensors: there is no directory {str(path.parent)!r}")
            return path.parent, path.name.removesuffix(ending)
    if path.is_file() or (path.suffix and not path.is_dir() and path.suffix in (".bin", ".pt", ".pth", ".gguf", ".json")):
        raise ValueError(f"save_safetensors: expected a .safetensors file or a directory, got {str(path)!r}")
    path.mkdir(parents=True, exist_ok=True)
    return path, STEM


def _bytes(size: int | str | None) -> int | None:
    if size is None or isinstance(size, int):
        if size is not None and size < 1:
            raise ValueError(f"save_safetensors: max_shard_size must be at least 1 byte, not {size}")
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"save_safetensors: max_shard_size must be a number of bytes or such as '5GB', not {size!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


# ---- files


@dataclass
class _Target:
    """Files under temporary names until ``commit``; in the end, however it comes, no temporary file is left."""

    folder: Path
    stem: str
    num_files: int
    session: Session | None  # whose workers write

    def __post_init__(self) -> None:
        self._tag = secrets.token_hex(4)

    def temporary(self, number: int) -> Path:
        return self.folder / f".{self.stem}.{self._tag}.{number}.tmp"

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None and self.session is not None:
            with suppress(DTorchError):  # what was asked for is written first: a file that is gone would be one more error
                self.session.ask_statistics().result()
        for number in range(-1, self.num_files):
            self.temporary(number).unlink(missing_ok=True)

    def commit(self, groups: list[list[str]], total_bytes: int) -> Path:
        """Give the files their names. One rename or removal makes the new checkpoint count and the old one not."""
        whole, index = self.folder / f"{self.stem}.safetensors", self.folder / f"{self.stem}{INDEX}"
        old = self._old_files(index)
        if self.num_files == 1:
            os.replace(self.temporary(0), whole)
            final = whole
            index.unlink(missing_ok=True)
        else:
            names = self._names()
            for number, name in enumerate(names):
                os.replace(self.temporary(number), self.folder / name)
            weight_map = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
            text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
            with self.temporary(-1).open("w") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(self.temporary(-1), index)
            final = index
            whole.unlink(missing_ok=True)  # readers prefer it to an index
        for path in old:
            path.unlink(missing_ok=True)
        _sync_folder(self.folder)
        return final

    def _names(self) -> list[str]:
        """Names that no file has, so that the old checkpoint stays whole until the new index is there."""
        for tag in ("", f"-{self._tag}"):
            names = [f"{self.stem}{tag}-{i + 1:05}-of-{self.num_files:05}.safetensors" for i in range(self.num_files)]
            if not any((self.folder / name).exists() for name in names):
                break
        return names

    def _old_files(self, index: Path) -> list[Path]:
        """Shards of the checkpoint that is replaced; never a file that an index of another name uses."""
        try:
            old = set(index_files(index).values())
        except (FileNotFoundError, ValueError):
            return []
        for other in self.folder.glob(f"*{INDEX}"):
            if other != index:
                try:
                    old -= set(index_files(other).values())
                except ValueError:
                    continue
        mine = re.compile(re.escape(self.stem) + r"(-[0-9a-f]+)?-\d{5}-of-\d{5}\.safetensors")
        return [self.folder / name for name in old if mine.fullmatch(name)]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _allocate(path: Path, head: bytes, size: int) -> None:
    """A file of the final size with its header. Raises OSError where there is no room, before anybody writes."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.ftruncate(fd, size)
        if size and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in _NO_FALLOCATE:
                    raise
        with open(fd, "r+b", closefd=False) as file:
            file.write(head)
            file.flush()
        os.fsync(fd)
    finally:
        os.close(fd)


_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
"""What file systems answer that cannot reserve space."""


# ---- one file


def _write(tensors: dict[str, Any], metadata: dict[str, str], path: Path, bar: Progress) -> None:
    facts = {name: (dtype_name(x.dtype), tuple(x.shape)) for name, x in tensors.items()}
    head, entries, size = build_header(facts, metadata)
    _allocate(path, head, size)
    writers: dict[DeviceMesh, _Writer] = {}
    for turn, (name, x) in enumerate(tensors.items()):
        if isinstance(x, Tensor):
            writer = writers.get(x.device_mesh)
            if writer is None:
                writer = writers[x.device_mesh] = _Writer(x.device_mesh, str(path))
            writer.write(_settled(x), entries[name], turn)
        else:
            everything = tuple((0, n) for n in x.shape)
            write_box(FileAccess(), str(path), entries[name].start, tuple(x.shape), everything, x)
        bar.add(_size_bytes(x))
    done = [writer.finish() for writer in writers.values()]
    if done:
        check_loop()
    written = sum(int(receipt.to_torch().sum()) for receipt in done)
    expected = sum(_size_bytes(x) for x in tensors.values() if isinstance(x, Tensor))
    assert written == expected, f"{written} bytes were written in place of {expected}"


def _settled(x: Tensor) -> Tensor:
    """``x`` with nothing pending and up to date; sums become shards, so that no device holds more than before."""
    if x._spec.link == STALE:
        from dtorch.ops._alias import refresh

        refresh(x)
    if any(p.is_partial() for p in x.placements):
        cut = Shard(0) if x.ndim else Replicate()
        x = x.redistribute([cut if p.is_partial() else p for p in x.placements])
    return x


class _Writer:
    """Records the writes of one mesh into one file; a receipt goes from call to call, so one look tells of all."""

    def __init__(self, mesh: DeviceMesh, path: str) -> None:
        self._session: Session = current_session()
        self._path = path
        self._signatures: dict[Spec | None, Signature] = {}
        cut = [Shard(0)] * mesh.ndim
        self._receipt = zeros(len(mesh.devices), dtype=torch.int64, device_mesh=mesh, placements=cut)

    def write(self, x: Tensor, entry: Entry, turn: int) -> None:
        """Each device's piece to its place; among copies, ``turn`` chooses."""
        self._record("write", x._spec, [x._slot, self._receipt._slot], [entry.start, turn])

    def finish(self) -> Tensor:
        """The receipt, once all is on disk: bytes that each device has written."""
        self._record("sync_file", None, [self._receipt._slot], [])
        return self._receipt

    def _record(self, kernel: str, spec: Spec | None, ins: list[int], numbers: list[int]) -> None:
        sig = self._signatures.get(spec)
        if sig is None:
            sig = self._signatures[spec] = self._define(kernel, spec, len(numbers))
        recorder = sig.recorder
        slot = recorder.slot()
        sig.put(((sig.id, slot, *ins, *numbers), *source(_getframe(1))))
        made = _new(Tensor)
        made._spec, made._slot = self._receipt._spec, slot
        self._receipt = made
        if recorder.expects_after_put:
            recorder.after_put()

    def _define(self, kernel: str, spec: Spec | None, num_numbers: int) -> Signature:
        receipt = self._receipt._spec
        inputs = (receipt.layout,) if spec is None else (spec.layout, receipt.layout)
        args = [["n", i] for i in range(num_numbers)]

        def build(number: int) -> Definition:
            return Definition(
                number, f"dtorch.{kernel}", kernel, args, {}, inputs, (receipt.layout,), (), {"path": self._path}
            )

        return self._session.define(build, (receipt,), "dtorch.save_safetensors", inputs)
