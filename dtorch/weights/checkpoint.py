"""A checkpoint on disk, seen from the client: which tensors there are and in which files. Only headers are read here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dtorch.runtime.safetensors import LENGTH_BYTES, Entry, FormatError, header_size, parse_header

INDEX = ".safetensors.index.json"
_PREFERRED = ("model", "diffusion_pytorch_model")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        path: absolute.
        file_bytes: size of the whole file.
    """

    path: str
    file_bytes: int
    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def dtype(self) -> str:
        return self.entry.dtype

    @property
    def size_bytes(self) -> int:
        return self.entry.size_bytes


@dataclass(frozen=True)
class Checkpoint:
    """What a path holds.

    Attributes:
        path: as it was given, made absolute.
        tensors: name -> where it lies.
        aliases: further name -> name of the tensor that it shares memory with.
    """

    path: Path
    tensors: dict[str, Stored]
    aliases: dict[str, str]

    def get(self, name: str) -> Stored | None:
        return self.tensors.get(self.aliases.get(name, name))

    def names(self) -> list[str]:
        return [*self.tensors, *self.aliases]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a ``.safetensors`` file, of all files of an index (``*.index.json``), or of what a directory
    holds: its one file, or its one index.

    Raises:
        FileNotFoundError: nothing is there, or a file that the index names is not.
        ValueError: a file is not what its name says, or a directory holds several checkpoints.
    """
    given = Path(path)
    absolute = Path(os.path.abspath(given))
    if absolute.is_dir():
        found = _of_directory(absolute)
    elif not absolute.exists() and absolute.with_name(absolute.name + INDEX.removeprefix(".safetensors")).exists():
        found = absolute.with_name(absolute.name + INDEX.removeprefix(".safetensors"))  # it was saved in shards
    elif not absolute.exists():
        near = sorted(f.name for f in absolute.parent.glob("*.safetensors*"))[:6] if absolute.parent.is_dir() else []
        hint = f"; beside it are {', '.join(near)}" if near else ""
        raise FileNotFoundError(f"no such file or directory: {str(given)!r}{hint}")
    else:
        found = absolute
    if found.name.endswith(".json"):
        return _of_index(absolute, found)
    tensors, aliases = _of_file(found)
    return Checkpoint(absolute, tensors, aliases)


def _of_directory(folder: Path) -> Path:
    """The index or the file to read. A whole file wins over an index of the same name, as elsewhere."""
    files = sorted(folder.glob("*.safetensors"))
    indices = sorted(folder.glob(f"*{INDEX}"))
    for stem in _PREFERRED:
        for candidate in (folder / f"{stem}.safetensors", folder / f"{stem}{INDEX}"):
            if candidate in files or candidate in indices:
                return candidate
    if len(indices) == 1:
        return indices[0]
    if not indices and len(files) == 1:
        return files[0]
    if not indices and not files:
        there = sorted(f.name for f in folder.iterdir())[:8]
        other = next((n for n in there if n.endswith((".bin", ".pt", ".pth"))), None)
        hint = f"; {other} is another format: save it again as safetensors" if other else ""
        raise FileNotFoundError(
            f"{str(folder)!r} holds no .safetensors file and no *{INDEX}, only {', '.join(there) or 'nothing'}{hint}"
        )
    several = ", ".join(f.name for f in indices or files)
    raise ValueError(f"{str(folder)!r} holds several checkpoints ({several}): name the one that is meant")


def index_files(index: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file, from an index.

    Raises:
        ValueError: it is no index.
    """
    try:
        tree = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])
        return msgspec.convert(tree["weight_map"], dict[str, str])
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError) as error:
        raise ValueError(f"{str(index)!r} is no index of weights: it needs a \"weight_map\" ({error})") from None


def _of_index(given: Path, index: Path) -> Checkpoint:
    tensors: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    weight_map = index_files(index)
    for name in sorted(set(weight_map.values())):
        file = index.parent / name
        if not file.exists():
            raise FileNotFoundError(f"{str(index)!r} names {name!r}, which is not beside it")
        own, more = _of_file(file)
        tensors.update({key: stored for key, stored in own.items() if weight_map.get(key, name) == name})
        aliases.update(more)
    absent = [name for name in weight_map if name not in tensors and name not in aliases]
    if absent:
        raise ValueError(f"{weight_map[absent[0]]!r} lacks {absent[0]!r}, which {str(index)!r} says it has")
    return Checkpoint(given, tensors, aliases)


def _of_file(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors and aliases of one file; an alias is an entry of the metadata that names a tensor of the file."""
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        try:
            size = header_size(file.read(LENGTH_BYTES), file_bytes)
            entries, metadata = parse_header(file.read(size), file_bytes)
        except FormatError as error:
            raise ValueError(f"{str(path)!r} is no safetensors file: {error}") from None
    tensors = {name: Stored(str(path), file_bytes, entry) for name, entry in entries.items()}
    return tensors, {name: own for name, own in metadata.items() if own in tensors and name not in tensors}


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first names, for a message."""
    shown = list(names)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(map(repr, shown[:most])) + more


def shards(sizes: dict[str, int], most_bytes: int | None) -> Iterator[list[str]]:
    """Names in groups of at most ``most_bytes`` together, in order; a larger tensor is alone in its group."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and most_bytes is not None and total + size > most_bytes:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group
