"""dtorch/runtime/windows.py and the kernel "window": halos, and nothing but halos."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
from dtorch import Replicate, Shard
from dtorch.runtime.layout import box, coords, numel
from dtorch.runtime.moves import Placed, plan_reads
from dtorch.runtime.windows import Held, Looked, Share, Slide, Spread, Taps, clipped, looked_of, plain, spans
from tests._sharding import check, distribute, grid, like, mesh_of, moved

R = Replicate()


# ---- what a window reads


@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_windows_read_what_the_op_depends_on(kernel: int) -> None:
    """Against torch: an input element that changes an output lies in what that output reads, and the ends are needed."""
    n = 9
    for stride, dilation, before in product((1, 2, 4), (1, 2), (0, 1)):
        weight = torch.ones(1, 1, kernel)
        base = torch.zeros(1, 1, n)
        slide = Slide(kernel, stride, dilation, before)
        spread = Spread(kernel, stride, dilation, before)
        each: list[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = [
            (slide, lambda x: F.conv1d(x, weight, None, stride, before, dilation)),  # noqa: B023  (called within the round)
            (spread, lambda x: F.conv_transpose1d(x, weight, None, stride, before, 0, 1, dilation)),  # noqa: B023
        ]
        for seen, fn in each:
            touched = [fn(base + F.one_hot(torch.tensor(i), n).float())[0, 0] != 0 for i in range(n)]
            for o in range(touched[0].numel()):
                low, high = seen.reads(o, o + 1)
                sources = [i for i in range(n) if touched[i][o]]
                assert all(low <= i < high for i in sources)
                if seen is slide:
                    inside = [i for i in range(low, high, dilation) if 0 <= i < n]
                    assert sources == inside


def test_shares_are_those_of_adaptive_pooling() -> None:
    for n, m in ((5, 3), (7, 7), (4, 9), (12, 5)):
        for o in range(m):
            low, high = Share(n, m).reads(o, o + 1)
            x = torch.full((1, 1, n), -1.0)
            x[0, 0, low:high] = 1
            assert F.adaptive_avg_pool1d(x, m)[0, 0, o] == 1
            assert -F.adaptive_max_pool1d(-x, m)[0, 0, o] == 1


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "cubic", "lanczos"])
def test_taps_are_those_of_interpolation(mode: str) -> None:
    """Positions to the element, in float32 and float64, with and without a factor, corners and filters."""
    draw = random.Random(mode)
    for _ in range(250):
        n, m, factor = draw.randint(1, 300), draw.randint(1, 400), draw.choice([None, 2.0, 0.5, draw.uniform(0.2, 4)])
        corners, smooth = draw.choice(list(product((False, True), repeat=2))[: 1 if mode.startswith("nearest") else 4])
        if mode == "lanczos":
            corners, smooth = False, True
        dtype = draw.choice([torch.float32, torch.float64])
        x = torch.randn(n, dtype=dtype)
        named: dict[str, Any] = {"size": m} if factor is None or int(n * factor) < 1 else {"scale_factor": factor}
        if mode.startswith("nearest"):
            wanted = F.interpolate(x[None, None], mode=mode, **named)[0, 0]
        else:
            named = {k: (v, 3 if k == "size" else 1.0) for k, v in named.items()}
            kind = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
            plane = x[None, None, :, None].expand(1, 1, n, 3).contiguous()
            wanted = F.interpolate(plane, mode=kind, align_corners=corners, antialias=smooth, **named)[0, 0, :, 0]
        taps = Taps(mode, n, wanted.numel(), factor if "scale_factor" in named else None, corners, smooth, dtype.itemsize == 8)
        index, weight = taps.table()
        near = 1e-4 if dtype == torch.float32 else 1e-9
        torch.testing.assert_close((x[index] * weight.to(dtype)).sum(1), wanted, atol=near, rtol=near)


def test_windows_travel_as_plain_data() -> None:
    for window in (Slide(3, 2, 1, 1), Spread(2, 3, 1, 0), Share(7, 3), Held(4), Taps("linear", 4, 9, None, True, False, False)):
        assert looked_of(plain(Looked(2, 1, window, 5))) == Looked(2, 1, window, 5)


def test_halos_are_planned_over_any_number_of_neighbours() -> None:
    """9 rows on 5 devices (2, 2, 2, 2, 1), windows of 7: each needs its neighbours and theirs."""
    source = Placed("cpu", tuple(range(5)), (5,), (9, 3), (0,))
    needed = spans(source, source, [Looked(0, 0, Slide(7, 1, 1, 3))])
    assert needed[0][0] == (-3, 5)  # padding included
    moves = plan_reads(source, tuple(clipped(span, (9, 3)) for span in needed))
    assert [moves.device(p).target for p in source.places()] == [
        ((0, 5), (0, 3)), ((0, 7), (0, 3)), ((1, 9), (0, 3)), ((3, 9), (0, 3)), ((5, 9), (0, 3)),
    ]  # fmt: skip
    for place in source.places():
        own = moves.device(place)
        got = sum(numel(part) for _, part in own.receives) + (numel(own.keep) if own.keep else 0)
        assert own.target is not None
        assert got == numel(own.target)
    assert moves.elements_between == sum((b - a) * 3 for (a, b), _ in (moves.device(p).target for p in source.places())) - 27


# ---- ops

X1, X2, X3 = grid(2, 4, 13), grid(2, 4, 11, 7), grid(1, 2, 5, 4, 6)
TIES = (grid(2, 4, 11, 7) * 1.5).round()
HOLES = X2.clone()
HOLES[0, :, 3:8] = -float("inf")
HOLES[1, 2, 4, 4] = float("nan")
W1, W2, W3 = grid(6, 4, 4), grid(6, 4, 3, 3), grid(3, 2, 3, 2, 3)
G2, T2 = grid(8, 2, 2, 3), grid(4, 3, 3, 2)
B = grid(6)

CONVOLUTIONS: dict[str, tuple[Callable[[Any], Any], torch.Tensor]] = {
    "1d same": (lambda x: F.conv1d(x, like(x, W1), like(x, B), padding="same", dilation=3), X1),
    "1d valid": (lambda x: F.conv1d(x, like(x, W1), padding="valid", stride=5, dilation=2), X1),
    "2d": (lambda x: F.conv2d(x, like(x, W2), like(x, B), padding=1), X2),
    "2d strided": (lambda x: F.conv2d(x, like(x, W2), stride=(2, 4), padding=(1, 2)), X2),
    "2d far": (lambda x: F.conv2d(x, like(x, W2), padding=(4, 3), dilation=(4, 3)), X2),
    "2d groups": (lambda x: F.conv2d(x, like(x, G2), padding="same", groups=2), X2),
    "2d unbatched": (lambda x: F.conv2d(x, like(x, W2), like(x, B), stride=2), X2[0]),
    "3d": (lambda x: F.conv3d(x, like(x, W3), padding=1, stride=(2, 1, 2)), X3),
    "1d transposed": (lambda x: F.conv_transpose1d(x, like(x, grid(4, 2, 1)), stride=3, output_padding=2), X1),
    "2d transposed": (
        lambda x: F.conv_transpose2d(x, like(x, T2), like(x, B[:3]), (5, 2), (0, 1), (4, 1)), X2,
    ),
    "2d transposed groups": (lambda x: F.conv_transpose2d(x, like(x, T2), padding=1, dilation=2, groups=2), X2),
}  # fmt: skip

POOLS: dict[str, tuple[Callable[[Any], Any], torch.Tensor]] = {
    "avg": (lambda x: F.avg_pool2d(x, 3, 2, 1, True), X2),
    "avg of what is there": (lambda x: F.avg_pool2d(x, (2, 3), (3, 1), (1, 0), True, False), X2),
    "avg divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, divisor_override=5), X2),
    "avg 1d": (lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), X1),
    "max": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), HOLES),
    "max far": (lambda x: F.max_pool2d(x, (4, 2), 1, (2, 1), (3, 2)), X2),
    "max of ints": (lambda x: F.max_pool2d(x, 3, 1, 1), torch.arange(-30, 30).reshape(1, 2, 6, 5)),
    "max indices": (lambda x: tuple(F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True)), TIES),
    "max indices of holes": (lambda x: tuple(F.max_pool2d(x, 3, 2, 1, return_indices=True)), HOLES),
    "max 3d": (lambda x: tuple(F.max_pool3d(x, 2, 2, 1, return_indices=True)), X3),
    "lp": (lambda x: F.lp_pool2d(x.abs(), 2.0, (3, 2), 2, True), X2),
    "adaptive avg": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), X2),
    "adaptive avg larger": (lambda x: F.adaptive_avg_pool2d(x, (13, 1)), X2),
    "adaptive max": (lambda x: F.adaptive_max_pool2d(x, (1, 5)), HOLES),
    "adaptive max indices": (lambda x: tuple(F.adaptive_max_pool2d(x, (4, 3), return_indices=True)), TIES),
}

OTHERS: dict[str, tuple[Callable[[Any], Any], torch.Tensor]] = {
    "nearest": (lambda x: F.interpolate(x, scale_factor=(0.6, 1.7)), X2),
    "nearest-exact": (lambda x: F.interpolate(x, (17, 5), mode="nearest-exact"), X2),
    "bilinear": (lambda x: F.interpolate(x, (17, 5), mode="bilinear"), X2),
    "bilinear corners": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True), X2),
    "bilinear smooth": (lambda x: F.interpolate(x, (4, 3), mode="bilinear", antialias=True), X2),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=(0.6, 1.7), mode="bicubic"), X2),
    "bicubic smooth": (lambda x: F.interpolate(x, (4, 9), mode="bicubic", antialias=True), X2),
    "area": (lambda x: F.interpolate(x, (4, 9), mode="area"), X2),
    "linear": (lambda x: F.interpolate(x, 29, mode="linear"), X1),
    "reflect": (lambda x: F.pad(x, (2, -1, -2, 3), mode="reflect"), X2),
    "replicate": (lambda x: F.pad(x, (1, 1, 1, 2, 1, 1), mode="replicate"), X3),
    "circular": (lambda x: F.pad(x, (2, -1, -2, 3), mode="circular"), X2),
    "frames": (lambda x: x.unfold(2, 4, 3), X2),
    "shuffle": (lambda x: F.pixel_shuffle(x, 2), grid(2, 8, 5, 3)),
    "unshuffle": (lambda x: F.pixel_unshuffle(x, 2), grid(2, 3, 10, 6)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", [*CONVOLUTIONS, *POOLS, *OTHERS])
def test_spatial_shards_need_no_gather(name: str) -> None:
    """Legal as they are on every dim: uneven, empty and 2x2 shards, halos wider than a neighbour's shard."""
    fn, x = {**CONVOLUTIONS, **POOLS, **OTHERS}[name]
    space = range(x.ndim - (2 if name == "2d unbatched" else x.ndim - 2), x.ndim)
    legal = [(Shard(d),) for d in space] + [((Shard(d), Shard(x.ndim - 1)),) for d in space]
    check(fn, x, mesh=((5,), (2, 2)), legal=legal, limit=14)


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.conv2d(x, like(x, W2), padding=1),
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.avg_pool2d(x, 3, 1, 1),
    ],
)
def test_only_halos_move(fn: Callable[[Any], Any], dim: int) -> None:
    """A window of 3 takes one row from each side: 6 rows between 4 devices, of 32 that there are."""
    x = grid(2, 4, 32, 32)
    mine = distribute(x, mesh_of(4), [Shard(dim)])
    before = moved()
    made = fn(mine)
    assert moved() - before == 6 * (2 * 4 * 32) * 4
    assert made.placements == (Shard(dim),)
    torch.testing.assert_close(made.to_torch(), fn(x), atol=1e-5, rtol=1e-5)


def test_batch_channels_and_groups_move_nothing() -> None:
    x, w = grid(4, 8, 6), grid(8, 1, 3, seed=1)
    mesh = mesh_of(4)
    before = moved()
    for placed, weight in ((Shard(0), R), (Shard(1), Shard(0)), (Shard(1), R), (R, Shard(0))):
        made = F.conv1d(distribute(x, mesh, [placed]), distribute(w, mesh, [weight]), groups=8)
        assert made.placements == ((placed if placed != R else Shard(1)),)
        torch.testing.assert_close(made.to_torch(), F.conv1d(x, w, groups=8))
    full, bias = grid(6, 8, 3), grid(6)
    made = F.conv1d(distribute(x, mesh, [Shard(1)]), distribute(full, mesh, [R]), distribute(bias, mesh, [R]))
    assert made.placements[0].is_partial()
    torch.testing.assert_close(made.to_torch(), F.conv1d(x, full, bias), atol=1e-5, rtol=1e-5)
    assert moved() == before


def test_batch_norm_in_training_uses_the_whole_batch() -> None:
    x = grid(5, 4, 6, 3) * 3 + 1
    two: list[tuple[tuple[int, ...], list[Any]]] = [((2, 2), [Shard(0), Shard(2)]), ((2, 2), [Shard(1), Shard(0)])]
    for shape, placed in [((3,), [Shard(0)]), ((3,), [Shard(1)]), *two]:
        mesh = mesh_of(*shape)
        mean, var = torch.zeros(4), torch.ones(4)
        channels = [Shard(0) if p == Shard(1) else R for p in placed]
        theirs = [distribute(t, mesh, channels) for t in (mean, var)]
        made = F.batch_norm(distribute(x, mesh, placed), *theirs, training=True)
        torch.testing.assert_close(made.to_torch(), F.batch_norm(x, mean, var, training=True))
        torch.testing.assert_close(theirs[0].to_torch(), mean)
        torch.testing.assert_close(theirs[1].to_torch(), var)
        assert made.placements == tuple(placed)


def test_cuts_of_input_and_output_may_differ() -> None:
    """A stride leaves fewer rows, so devices at the end make rows of what others hold, or nothing."""
    x, mesh = grid(1, 1, 9, 2), mesh_of(4)
    made = F.conv2d(distribute(x, mesh, [Shard(2)]), distribute(torch.ones(1, 1, 1, 1), mesh, [R]), stride=(4, 1))
    held = [box((1, 1, 3, 2), (2,), (4,), c)[2] for c in coords((4,))]
    assert held == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert [tuple(p.shape) for p in made.to_shards()] == [(1, 1, b - a, 2) for a, b in held]
    assert torch.equal(made.to_torch(), x[:, :, ::4])


CHANNELS_AND_SPACE: list[Any] = [
    ((Shard(1), Shard(2)), (Shard(1), R), (R, R)),
    ((Shard(2), R), (R, Shard(0)), (R, Shard(0))),
    ((Shard(2), Shard(1)), (R, Shard(1)), (R, R)),
]


def test_input_weight_and_bias_in_any_placement() -> None:
    """Pending ones too; channels on one mesh axis with space on the other need no repair."""
    x = grid(2, 4, 7, 5)

    def conv(x: Any, w: Any, b: Any) -> Any:
        return F.conv2d(x, w, b, padding=1, stride=2)

    def transposed(x: Any, w: Any) -> Any:
        return F.conv_transpose2d(x, w, None, 2, 1, groups=2)

    check(conv, x, W2, B, mesh=((2, 2),), partial=True, limit=40, tolerance=1e-4, legal=CHANNELS_AND_SPACE)
    check(transposed, x, T2, mesh=((3,), (2, 2)), partial=True, limit=20, tolerance=1e-4)


def test_what_torch_refuses() -> None:
    x, w = grid(2, 4, 7, 5), W2
    for placed in ([Shard(2)], [R]):
        mine, weight = distribute(x, mesh_of(3), placed), distribute(w, mesh_of(3), [R])
        for fn in (
            lambda x, w: F.conv2d(x, w, padding=-1), lambda x, w: F.conv2d(x, w, padding="same", stride=2),
            lambda x, w: F.conv2d(x, w, groups=3), lambda x, w: F.max_pool2d(x, 3, padding=2), lambda x, w: F.avg_pool2d(x, 9),
            lambda x, w: F.pad(x, (0, 0, 9, 9), mode="reflect"), lambda x, w: F.interpolate(x), lambda x, w: x.unfold(2, 9, 1),
        ):
            with pytest.raises((RuntimeError, ValueError)) as theirs:
                fn(x, w)
            with pytest.raises(type(theirs.value)) as ours:
                fn(mine, weight)
            assert str(ours.value).split(".")[0] == str(theirs.value).split(".")[0]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(
            width, width, 3, padding=2, dilation=2, padding_mode="reflect"
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: Any) -> Any:
        return F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x)), inplace=True))))


@pytest.mark.parametrize("training", [True, False])
def test_a_network_on_an_image_cut_in_four(training: bool) -> None:
    """Every layer keeps height and width sharded, up to a pending mean."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), Residual(8),
        nn.AvgPool2d(2, ceil_mode=True), nn.Upsample(scale_factor=2, mode="bilinear"), nn.ConvTranspose2d(8, 8, 2, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    ).train(training)  # fmt: skip
    image = grid(2, 3, 37, 29)
    mine = dtorch.distribute(copy.deepcopy(net), mesh_of(2, 2), plan=None)
    h: Any = distribute(image, mesh_of(2, 2), [Shard(2), Shard(3)])
    for layer in mine:
        h = layer(h)
        if h.ndim == 4 and h.shape[-1] > 1:
            assert h.placements == (Shard(2), Shard(3))
    with torch.no_grad():
        torch.testing.assert_close(h.to_torch(), net(image), atol=1e-5, rtol=1e-5)
