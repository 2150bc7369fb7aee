"""``vllm bench serve`` without the rest of vLLM's command line, which wants a device."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
