"""Convert weights: a Hugging Face folder, or the newest checkpoint of a training run, to a Hugging Face folder.

python launch/convert.py --from runs/quickstart --to export [--step 400] [--dtype bfloat16] [--max-shard-size 5GB]
python launch/convert.py --from ERNIE-4.5-21B-A3B-PT --to copy [--mtp keep] [--json]

Runs on the CPU and holds the whole model in host memory, in the format it is read in.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ernie_jax.config import ModelConfig
    from ernie_jax.models import TextModel

Report = Callable[[int, int], None]
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Source:
    """What is converted: a line about it, its shape, the format of its weights, how to load it, files that go along."""

    what: str
    config: ModelConfig
    dtype: str
    load: Callable[[Report], TextModel]
    companions: tuple[Path, ...]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, type=Path, help="Hugging Face folder, or a run's folder")
    parser.add_argument(
        "--to", dest="target", required=True, type=Path, help="folder to write; an earlier export in it is replaced"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="format of the weights; default: as they are")
    parser.add_argument("--max-shard-size", default="5GB", help="most bytes of a file, such as 5GB or 512MiB")
    parser.add_argument(
        "--mtp", choices=("drop", "keep"), help="tensors of multi-token prediction; default: drop of a folder, keep of a run"
    )
    parser.add_argument("--step", type=int, help="step of a run; default: the newest whole checkpoint")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Say what will be done, do it with progress, end with one line; 2 for a mistake of the user."""
    args = parse_arguments(argv)
    # Before jax is imported: a conversion needs no accelerator, and its memory may be too small for the whole model.
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        result = convert(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if args.json:
        print(json.dumps(result), flush=True)
    else:
        size = f"{result['files']} file(s), {result['bytes'] / 1e9:.3f} GB in {result['dtype']}"
        print(f"Wrote {result['parameters']:,} parameters to {result['to']}: {size}")
    return 0


def convert(args: argparse.Namespace) -> dict[str, Any]:
    """Do what the command line asks for."""
    from ernie_jax.checkpoint import save_pretrained
    from ernie_jax.checkpoint.export import parse_size
    from ernie_jax.config import count_parameters

    if args.source.resolve() == args.target.resolve():
        raise ValueError(f"--from and --to are both {args.source}; give another folder to write to")
    limit = parse_size(args.max_shard_size)
    is_run = (args.source / "checkpoints").is_dir()
    source = _from_run(args) if is_run else _from_hugging_face(args)
    dtype = args.dtype or source.dtype
    parameters = count_parameters(source.config).total
    print(f"From      {source.what}", f"Model     {parameters:,} parameters, {source.config.num_hidden_layers} layers", sep="\n")
    print(f"To        {args.target}: {dtype} (router gates and biases float32), files of at most {args.max_shard_size}", flush=True)
    with _progress("reading") as report:
        model = source.load(report)
    with _progress("writing") as report:
        save_pretrained(model, args.target, max_shard_size=limit, dtype=dtype, progress=report)
    for file in source.companions:
        shutil.copy2(file, args.target / file.name)
    files = sorted(args.target.glob("model*.safetensors"))
    return {
        "from": str(args.source),
        "to": str(args.target),
        "parameters": parameters,
        "dtype": dtype,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _from_hugging_face(args: argparse.Namespace) -> Source:
    from ernie_jax.checkpoint import load_pretrained
    from ernie_jax.checkpoint.table import table_of
    from ernie_jax.checkpoint.weight_files import FLOAT_FORMATS, WeightFiles
    from ernie_jax.config import config_from_hf

    if args.step is not None:
        raise ValueError(f"--step={args.step}, but {args.source} is not a run: it has no folder checkpoints")
    with WeightFiles(args.source) as files:
        config = config_from_hf(args.source, tensor_names=files.shapes())
        table_of(config)  # says now whether this class of models can be converted
        stored = files.entries[_EMBEDDING].format if _EMBEDDING in files.entries else "F32"
        size = sum(file.stat().st_size for file in {entry.file for entry in files.entries.values()})
    dtype, mtp = FLOAT_FORMATS.get(stored, "float32"), args.mtp or "drop"
    # float32 holds every 16-bit value exactly; bfloat16 is read as such because it takes half the memory.
    read_as = "bfloat16" if dtype == "bfloat16" and args.dtype in (None, "bfloat16") else "float32"
    others = (p for p in sorted(args.source.iterdir()) if p.is_file() and p.name != "config.json" and not _is_weights(p))
    return Source(
        what=f"{args.source}: Hugging Face weights in {dtype}, {size / 1e9:.3f} GB, MTP tensors: {mtp}",
        config=config,
        dtype=dtype,
        load=lambda report: load_pretrained(args.source, dtype=read_as, mtp=mtp, progress=report),
        companions=tuple(others),
    )


def _is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", ".bin", ".pdparams", ".pt", ".pth") or path.name.endswith(".index.json")


def _from_run(args: argparse.Namespace) -> Source:
    from ernie_jax.checkpoint import TrainCheckpointer
    from ernie_jax.config import run_config_from
    from ernie_jax.sharding import one_device_mesh
    from ernie_jax.train import abstract_state, run_layout
    from ernie_jax.train.step import model_of

    folder = args.source / "checkpoints"
    with TrainCheckpointer(folder, read_only=True) as checkpoints:
        step = checkpoints.latest_valid_step() if args.step is None else args.step
        if step is None:
            raise ValueError(f"{folder} has no whole checkpoint")
        run = run_config_from(checkpoints.extra(step)["config"])
    if args.mtp == "keep" and not run.mtp_blocks:
        raise ValueError("--mtp=keep: this run trains no blocks of multi-token prediction; leave --mtp out")
    layout = run_layout(run, one_device_mesh())

    def load(report: Report) -> TextModel:
        # The weights alone: moments are twice their size.
        wanted = dataclasses.replace(abstract_state(run, layout), opt_state=())
        with TrainCheckpointer(folder, read_only=True) as checkpoints:
            state, _ = checkpoints.restore(step, wanted, partial=True)
        report(1, 1)
        model = model_of(run, layout, state)
        if args.mtp == "drop":
            model.mtp = None
        return model

    kind = "weights" if run.optimizer.ema_decay is None else "running average of the weights"
    tokenizer = Path(run.data.tokenizer or args.source / "tokenizer")
    return Source(
        what=f"{folder / str(step)}: {kind} of a training run in float32",
        config=run.model,
        dtype="float32",
        load=load,
        companions=tuple(sorted(p for p in tokenizer.iterdir() if p.is_file())) if tokenizer.is_dir() else (),
    )


@contextmanager
def _progress(what: str) -> Iterator[Report]:
    """A bar on the error stream, so that the output can be read by programs."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
    sys.exit(main())
