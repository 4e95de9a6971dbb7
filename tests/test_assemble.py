"""Which pieces make a value, and in which order."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from dtorch import assemble
from dtorch.runtime.layout import box, coords, shard_code, slices

SHAPES = ((4, 6), (5,), (1, 7), (3, 1, 4), (2, 3, 4), (), (0, 3))
MESHES = ((2,), (3,), (2, 2), (1, 3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_pieces_in_a_row_are_the_value_wherever_that_is_said_and_said_wherever_it_is_so(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> None:
    devices = tuple(range(len(coords(mesh_shape))))
    value = torch.arange(torch.Size(shape).numel()).view(shape)
    everything = tuple((0, n) for n in shape)
    for codes in product([-1, *(shard_code(dim) for dim in range(len(shape)))], repeat=len(mesh_shape)):
        wanted = assemble.providers(shape, codes, mesh_shape, devices)
        at = dict(zip(devices, coords(mesh_shape), strict=True))
        pieces = {d: value[slices(box(shape, codes, mesh_shape, at[d]), everything)].clone() for d in wanted}
        order = assemble.rows(shape, codes, mesh_shape, devices)
        if order is None:
            by_place = [pieces[d].flatten() for d in sorted(wanted, key=lambda d: box(shape, codes, mesh_shape, at[d]))]
            assert not value.numel() or not torch.equal(torch.cat(by_place), value.flatten())
        else:
            assert sorted(order) == sorted(wanted)
            assert torch.equal(torch.cat([pieces[d].flatten() for d in order]).view(shape), value)
        assert torch.equal(assemble.whole(shape, codes, mesh_shape, devices, pieces, value.dtype), value)


def test_summands_are_in_no_row() -> None:
    assert assemble.rows((4,), (-2,), (2,), (0, 1)) is None
