"""Make an image with an unmodified diffusers pipeline on a device mesh: python examples/diffuse.py "a red fox" --tp 2

The pipeline is a tiny SD3 or FLUX with random weights, so what it shows is noise of a kind; `--path` takes a real one from
disk. Its modules are distributed by one call; the axes of the mesh say how: `--dp` splits the two halves of guidance,
`--tp` the layers, `--ulysses` and `--ring` the tokens, `--pp` the stack of layers.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

AXES = {"dp": "dp", "pp": "pp", "ulysses": "ulysess_cp", "ring": "ring_cp", "tp": "tp"}
"""Option -> name of the mesh axis."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make an image with an unmodified diffusers pipeline on a device mesh.",
    )
    parser.add_argument("prompt", nargs="?", default="a red fox in the snow", help="what the image should show (%(default)s)")
    parser.add_argument("--model", choices=("sd3", "flux"), default="sd3", help="which tiny pipeline (%(default)s)")
    parser.add_argument("--path", type=Path, help="a pipeline's folder on disk instead, as save_pretrained writes it")
    parser.add_argument("--output", type=Path, default=Path("image.png"), help="where the PNG goes (%(default)s)")
    parser.add_argument("--dp", type=positive, default=2, help="devices that share the batch: 2 for guidance (%(default)s)")
    parser.add_argument("--tp", type=positive, default=2, help="devices that share each layer (%(default)s)")
    parser.add_argument("--ulysses", type=positive, default=1, help="devices that share the tokens, by heads (%(default)s)")
    parser.add_argument("--ring", type=positive, default=1, help="devices that share the tokens, in a ring (%(default)s)")
    parser.add_argument("--pp", type=positive, default=1, help="pipeline stages (%(default)s)")
    parser.add_argument("--device", default="cpu", help="device type of the mesh (%(default)s)")
    parser.add_argument("--steps", type=positive, default=12, help="denoising steps (%(default)s)")
    parser.add_argument("--size", type=positive, default=32, help="height and width of the image, pixels (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise that the image begins with (%(default)s)")
    parser.add_argument("--cache", type=float, metavar="THRESHOLD",
                        help="first-block cache: skip layers where a step changes less than this (try 0.3); off by default")
    parser.add_argument("--plain", action="store_true", help="also make the image with plain torch, and compare")
    return parser.parse_args()


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def load(args: argparse.Namespace) -> Any:
    if args.path is None:
        import tiny_diffusion

        return getattr(tiny_diffusion, args.model)()
    from diffusers import DiffusionPipeline

    if not (args.path / "model_index.json").is_file():
        raise SystemExit(f"diffuse.py: {args.path} is no pipeline: it has no model_index.json")
    pipeline = DiffusionPipeline.from_pretrained(args.path, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make(pipeline: Any, args: argparse.Namespace, say: bool) -> torch.Tensor:
    """The image, shape [3, height, width], values from 0 to 1."""

    def show(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if say and sys.stderr.isatty():
            print(f"\rstep {step + 1} of {args.steps}", end="" if step + 1 < args.steps else "\n", file=sys.stderr)
        return tensors

    images = pipeline(
        args.prompt,
        height=args.size,
        width=args.size,
        num_inference_steps=args.steps,
        generator=torch.Generator().manual_seed(args.seed),
        callback_on_step_end=show,
        output_type="pt",
    ).images
    return images.to_torch()[0] if hasattr(images, "to_torch") else images[0]


def difference(image: torch.Tensor, reference: torch.Tensor) -> str:
    """Peak signal-to-noise ratio of two images with values from 0 to 1."""
    mean = float((image - reference).square().mean())
    return "the same bits" if mean == 0 else f"PSNR {-10 * math.log10(mean):.1f} dB"


def write(image: torch.Tensor, path: Path) -> None:
    from PIL import Image

    pixels = (image.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    Image.fromarray(pixels).save(path, format="PNG")


def main() -> None:
    args = parse_arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)  # diffusers' own
    import dtorch

    dtorch.init()  # the workers start while diffusers is imported
    shape = {name: getattr(args, option) for option, name in AXES.items() if getattr(args, option) > 1} or {"tp": 1}
    mesh = dtorch.init_device_mesh(args.device, tuple(shape.values()), mesh_dim_names=tuple(shape))
    pipeline = dtorch.distribute(load(args), mesh)
    print(f"{type(pipeline).__name__} on {mesh.size()} devices: {', '.join(f'{k}={v}' for k, v in shape.items())}")

    image = make(pipeline, args, say=True)
    peaks = [stats.peak / 2**20 for stats in dtorch.memory_stats(mesh)]
    print(f"peak memory of a device: {max(peaks):.2f} MiB at most, {min(peaks):.2f} MiB at least")
    if args.plain:
        print(f"beside plain torch: {difference(image, make(load(args), args, say=False))}")
    if args.cache is not None:
        with dtorch.first_block_cache(pipeline.transformer, args.cache) as cache:
            cached = make(pipeline, args, say=True)
        print(f"first-block cache: {cache.num_skipped} of {cache.num_calls} steps skipped, {difference(cached, image)}")
        image = cached
    write(image, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:  # sizes that the pipeline cannot make, more stages than layers
        sys.exit(f"diffuse.py: {error}")
