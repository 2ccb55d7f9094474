"""What can be written on the command line, and what the exit codes mean."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from .interrupts import REQUEUE_CODE

__all__ = [
    "BAD_INPUT",
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "OUT_OF_MEMORY",
    "make_parser",
]

Run = Callable[[argparse.Namespace], int]

DONE, FAILED, BAD_INPUT, INTERRUPTED, OUT_OF_MEMORY = 0, 1, 2, 130, 137

_EPILOGUE = f"""
MODEL is torchvision:NAME, hf:DIR, FILE.py:name or package.module:name, the last two
naming a model or a function without arguments that returns one.
DATA is a folder of images, a .npy file whose first axis is the sample, or FILE.py:name
of a dataset or a function without arguments that returns one.

exit codes:
  {DONE:>3}  done
  {FAILED:>3}  failed: the model, a batch, the store or its verification
  {BAD_INPUT:>3}  bad input: arguments, layers, data, another run in the store, or a run
       that cannot fit memory or disk, as is known before it begins
  {REQUEUE_CODE:>3}  stopped early by SIGTERM, SIGUSR1 or --time-limit; every block is
       whole: run the same command again
  {INTERRUPTED:>3}  stopped by Ctrl-C; the blocks that are done stay: run the same
       command again
  {OUT_OF_MEMORY:>3}  out of memory, which is also what a kill by the kernel gives
"""


def make_parser(runs: Mapping[str, Run]) -> argparse.ArgumentParser:
    """Return the parser; `arguments.command` is the one of `runs` that is asked for."""
    parser = argparse.ArgumentParser(
        prog="torchlens",
        description="Extract what happens inside PyTorch models, for whole datasets.",
        epilog=_EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_layers(commands, runs["layers"])
    _add_plan(commands, runs["plan"])
    _add_extract(commands, runs["extract"])
    _add_info(commands, runs["info"])
    _add_verify(commands, runs["verify"])
    return parser


def _command(commands: Any, name: str, run: Run, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=_EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--weights",
        metavar="W",
        help='name of torchvision weights, "none" for untrained ones, or a file of a '
        "state dict; default the best weights of torchvision, downloaded when missing",
    )
    parser.add_argument("--device", help="where the model is put, such as cuda:0")


def _add_example(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--data", metavar="DATA", help="whose first items are the input")
    group.add_argument(
        "--input-shape", metavar="N,N,..", help="of one sample of random numbers"
    )
    parser.add_argument(
        "--input-dtype", default="float32", help="of these; int64 gives tokens 0 to 99"
    )
    _add_reading(parser)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transform",
        metavar="T",
        help="turns an image into a tensor: FILE.py:name, or weights such as "
        "torchvision:ResNet18_Weights.DEFAULT; default that of torchvision weights",
    )
    parser.add_argument(
        "--inputs",
        metavar="KEY",
        help="entry of an item that is the model's input; NAME=KEY,.. for several",
    )


def _add_layers(commands: Any, run: Run) -> None:
    text = "List the sites of a model with their shapes and cost."
    parser = _command(commands, "layers", run, text)
    _add_model(parser)
    _add_example(parser)
    parser.add_argument("--ops", action="store_true", help="single operations too")


def _add_plan(commands: Any, run: Run) -> None:
    text = "Plan a capture: prove what each layer gives, and print or save it."
    parser = _command(commands, "plan", run, text)
    _add_model(parser)
    _add_example(parser)
    _add_chosen(parser, required=True)
    parser.add_argument("--rows", type=int, metavar="N", help="forecast so many rows")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON")


def _add_chosen(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--layers",
        nargs="+",
        metavar="L",
        required=required,
        help="labels, module addresses or patterns",
    )
    parser.add_argument("--dtype", help="what floating-point layers are cast to")


def _add_extract(commands: Any, run: Run) -> None:
    text = "Extract layers for a dataset into a store; run again to go on."
    parser = _command(commands, "extract", run, text)
    _add_model(parser)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument(
        "-o",
        "--output",
        metavar="STORE",
        required=True,
        help="folder or URL of the store, made when missing",
    )
    _add_chosen(parser, required=False)
    parser.add_argument("--plan", metavar="FILE", help="a saved plan, for --layers")
    _add_reading(parser)
    _add_pace(parser)
    parser.add_argument("--ids", metavar="COLUMN", help="entry or column with the ids")
    parser.add_argument("--metadata", metavar="FILE", help="CSV with one line a row")
    _add_rules(parser)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no forecast, progress or summary"
    )


def _add_pace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="samples run together; default 32"
    )
    parser.add_argument(
        "--num-workers",
        type=int,
        default=0,
        metavar="N",
        help="processes that read items",
    )
    parser.add_argument(
        "--block-rows",
        type=int,
        metavar="N",
        help="rows written and resumed as one, a power of two; default chosen",
    )


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preprocess",
        metavar="TEXT",
        help="how the data was prepared; a store is continued only under the same",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete a store that is there"
    )
    parser.add_argument(
        "--max-bytes", type=float, metavar="N", help="refuse a store larger than this"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="stop after so long, between two batches",
    )
    parser.add_argument(
        "--on-error",
        choices=["raise", "skip"],
        default="raise",
        help="items that cannot be read: end, or leave them empty and list them",
    )
    parser.add_argument(
        "--on-divergence",
        choices=["raise", "retrace"],
        default="raise",
        help="batches that take another path through the model: end, or trace them "
        "and leave empty what they do not have",
    )
    parser.add_argument(
        "--nonfinite",
        choices=["keep", "raise", "saturate"],
        default="keep",
        help="NaN, infinity and overflow on cast: count them, end, or cut overflow "
        "to the largest value",
    )


def _add_info(commands: Any, run: Run) -> None:
    text = "Say what a store holds."
    parser = _command(commands, "info", run, text)
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--json", action="store_true", help="everything that is known")


def _add_verify(commands: Any, run: Run) -> None:
    text = "Compare a store with its commit records."
    parser = _command(commands, "verify", run, text)
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--deep", action="store_true", help="read every byte")
