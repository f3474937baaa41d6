"""Continue a text with a Hugging Face checkpoint folder, or answer a question about images and videos.

python launch/generate.py --model runs/quickstart/export --prompt "def main(" --max-new-tokens 48
python launch/generate.py --model ERNIE-4.5-VL-28B-A3B-PT --image cat.jpg --prompt "What is this?"
"""

from __future__ import annotations

import argparse
import json
import sys
import time


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with config.json, weights and tokenizer.json")
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; repeat for a batch")
    parser.add_argument("--image", action="append", default=[], help="image before the prompt's text; repeat for several")
    parser.add_argument("--video", action="append", default=[], help="video after the images: a file, or a folder of frames")
    parser.add_argument("--chat", action="store_true", help="answer the prompt as a chat's question; always so with images")
    parser.add_argument(
        "--template", choices=("text", "vl", "thinking", "vl-thinking"), help="kind of chat template where the folder has none"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="0 for all tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--expert", type=int, default=1, help="devices the experts are split over; the rest hold copies")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    return parser.parse_args()


def main() -> None:
    """Load, generate, print."""
    args = parse_arguments()
    media = [{"type": kind, kind: path} for kind in ("image", "video") for path in getattr(args, kind)]
    if media and len(args.prompt) > 1:
        raise ValueError(f"{len(args.prompt)} prompts beside images or videos, which belong to one; give --prompt once")
    import jax

    import ernie_jax as ej
    from ernie_jax.serve.chat_settings import chat_settings

    print(f"loading {args.model} in {args.dtype} on {jax.device_count()} {jax.default_backend()} device(s)", file=sys.stderr)
    mesh = ej.make_mesh(data=-1, expert=args.expert)
    model = ej.load_pretrained(args.model, mesh=mesh, rules="serve", dtype=args.dtype)
    tokenizer = ej.Tokenizer.from_folder(args.model)
    options = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed")}
    start = time.perf_counter()
    is_chat = args.chat or media or args.template
    if is_chat:
        questions = [[{"role": "user", "content": [*media, {"type": "text", "text": prompt}]}] for prompt in args.prompt]
        texts = ej.chat(model, tokenizer, questions, **chat_settings(args.model, model.config, args.template), **options)
    else:
        texts = ej.generate(model, tokenizer, args.prompt, **options)
    seconds = time.perf_counter() - start
    for prompt, text in zip(args.prompt, texts, strict=True):
        print(f"{prompt}\n{text}\n" if is_chat else f"{prompt}{text}\n")
    if args.json:
        print(json.dumps({"texts": texts, "seconds": round(seconds, 3)}))
    else:
        print(f"{len(texts)} {'answer' if is_chat else 'continuation'}(s) in {seconds:.1f} s, compiling included")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
