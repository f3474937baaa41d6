"""Continue a text with a Hugging Face checkpoint folder.

python launch/generate.py --model runs/quickstart/export --prompt "def main(" --max-new-tokens 48
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
    import jax

    import ernie_jax as ej

    print(f"loading {args.model} in {args.dtype} on {jax.device_count()} {jax.default_backend()} device(s)", file=sys.stderr)
    mesh = ej.make_mesh(data=-1, expert=args.expert)
    model = ej.load_pretrained(args.model, mesh=mesh, rules="serve", dtype=args.dtype)
    tokenizer = ej.Tokenizer.from_folder(args.model)
    start = time.perf_counter()
    texts = ej.generate(
        model,
        tokenizer,
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
    )
    seconds = time.perf_counter() - start
    for prompt, text in zip(args.prompt, texts, strict=True):
        print(f"{prompt}{text}\n")
    if args.json:
        print(json.dumps({"texts": texts, "seconds": round(seconds, 3)}))
    else:
        print(f"{len(texts)} continuation(s) in {seconds:.1f} s, compiling included")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
