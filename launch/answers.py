"""Put questions with known answers to a checkpoint, and count the answers that are right.

python launch/answers.py --model runs/quickstart-vl/export --questions runs/quickstart-vl/digits/heldout.jsonl --picture answers.png
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ernie_jax.serve.answers import Answer


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with config.json, weights and tokenizer.json")
    parser.add_argument("--questions", required=True, help="JSONL of conversations, each ending with the answer expected")
    parser.add_argument("--limit", type=int, default=None, help="ask the first so many; all by default")
    parser.add_argument("--batch-size", type=int, default=32, help="questions answered at once")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--picture", default=None, help="write a PNG of some images with the model's answers")
    parser.add_argument("--run", default=None, help="folder of a training run, whose held-out losses are shown beside")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    return parser.parse_args()


def main() -> None:
    """Load, ask, count."""
    args = parse_arguments()
    if (args.limit is not None and args.limit < 1) or args.batch_size < 1:
        raise ValueError(f"--limit {args.limit}, --batch-size {args.batch_size}; expected at least 1")
    picture = Path(args.picture) if args.picture else None
    if picture is not None and (picture.suffix.lower() != ".png" or picture.is_dir()):
        raise ValueError(f"--picture {picture}; expected the name of a PNG file")
    losses_of_run = _held_out_losses(Path(args.run)) if args.run else {}
    import jax
    from rich.progress import track

    import ernie_jax as ej
    from ernie_jax.data import open_records
    from ernie_jax.data.multimodal.records import read_record
    from ernie_jax.serve.answers import answer_questions
    from ernie_jax.serve.chat_settings import chat_settings

    records = open_records(args.questions)
    count = len(records) if args.limit is None else min(args.limit, len(records))
    print(f"{count} of {len(records)} questions of {args.questions} to {args.model}, on {jax.default_backend()}", file=sys.stderr)
    asked = [read_record(records, i) for i in range(count)]
    model = ej.load_pretrained(args.model, dtype=args.dtype)
    tokenizer = ej.Tokenizer.from_folder(args.model)
    settings = chat_settings(args.model, model.config)
    start = time.perf_counter()
    answers = answer_questions(model, tokenizer, asked, batch_size=args.batch_size, max_new_tokens=args.max_new_tokens, **settings)
    done = list(track(answers, total=count, description="answering", transient=True, disable=not sys.stderr.isatty()))
    seconds = time.perf_counter() - start
    right = sum(answer.right for answer in done)
    result = {
        "accuracy": right / count,
        "right": right,
        "questions": count,
        "by_question": _by_question(done),
        "seconds": round(seconds, 2),
        **losses_of_run,
    }
    if picture is not None:
        draw(done, picture)
        result["picture"] = str(picture.resolve())
    for question, share in result["by_question"].items():
        print(f"{share:7.1%}  {question}")
    losses = ", ".join(f"{key[len('eval_loss_') :]} {value:.4f}" for key, value in result.items() if key.startswith("eval_loss_"))
    if args.json:
        print(json.dumps(result))
    else:
        held_out = f"; held-out loss: {losses}" if losses else ""
        written = f"; picture {result['picture']}" if picture is not None else ""
        print(f"Accuracy {result['accuracy']:.1%}: {right} of {count} answers right, in {seconds:.0f} s{held_out}{written}")


def _by_question(answers: Sequence[Answer]) -> dict[str, float]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        groups[answer.question].append(answer.right)
    return {question: sum(found) / len(found) for question, found in sorted(groups.items())}


def _held_out_losses(folder: Path) -> dict[str, float]:
    """The last held-out losses of a run, by kind of document."""
    from ernie_jax.train.records import read_records

    noted = [r for r in read_records(folder / "metrics.jsonl") if "eval_loss" in r]
    if not noted:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no held-out loss; give the folder of a run that evaluates")
    return {key: value for key, value in noted[-1].items() if key.startswith("eval_loss")}


def draw(answers: Sequence[Answer], path: Path, columns: int = 8, rows: int = 4) -> None:
    """Write a PNG with the images of some questions, each under the model's answer; wrong answers red, with the right one.

    Wrong answers come first, up to half of the places: they tell more.
    """
    import numpy as np
    from matplotlib.figure import Figure

    from ernie_jax.data.vision import read_image

    pictured = [a for a in answers if any(item.kind == "image" for item in a.record.media)]
    wrong = [a for a in pictured if not a.right][: columns * rows // 2]
    shown = [*wrong, *[a for a in pictured if a.right]][: columns * rows]
    figure = Figure(figsize=(1.6 * columns, 1.9 * rows), layout="constrained")
    for axes, answer in zip(figure.subplots(rows, columns).flat, shown, strict=False):
        images = [read_image(item.source) for item in answer.record.media if item.kind == "image"]
        height = max(image.shape[0] for image in images)
        padded = [np.pad(i, ((0, height - i.shape[0]), (0, 2), (0, 0)), constant_values=255) for i in images]
        axes.imshow(np.concatenate(padded, axis=1))
        title = answer.given if answer.right else f"{answer.given}  (is {answer.expected})"
        axes.set_title(title, fontsize=9, color="black" if answer.right else "red")
    for axes in figure.axes:
        axes.axis("off")
    figure.suptitle(f"{sum(a.right for a in answers)} of {len(answers)} right; wrong answers shown first")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
