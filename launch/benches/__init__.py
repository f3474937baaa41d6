"""One benchmark a file: `add_arguments(parser)` declares its options, `run(args)` measures, prints and returns the result."""
