"""The command line: parse, call one function, print.

Results go to standard output; progress, notes and errors to standard error.
"""

import argparse
import errno
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torchlens.errors import (
    BudgetError,
    DataError,
    InputError,
    ModelError,
    PlanError,
    ResumeError,
    SelectorError,
    TorchLensError,
)

from .interrupts import REQUEUE_CODE, RequeueExit

__all__ = ["main"]

DONE, FAILED, BAD_INPUT, OUT_OF_MEMORY = 0, 1, 2, 137

_BAD_INPUT = (
    BudgetError,
    DataError,
    InputError,
    ModelError,
    PlanError,
    ResumeError,
    SelectorError,
)

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
  {OUT_OF_MEMORY:>3}  out of memory, which is also what a kill by the kernel gives
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments)
    except RequeueExit as stop:
        _complain(str(stop))
        return REQUEUE_CODE
    except Exception as error:
        if arguments.debug:
            raise
        if isinstance(error, _BAD_INPUT):
            _complain(_describe(error))
            return BAD_INPUT
        if _is_out_of_memory(error):
            _complain(f"out of memory: {error}")
            return OUT_OF_MEMORY
        _complain(_describe(error))
        return FAILED


def _run(arguments: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace], int] = arguments.command
    return command(arguments)


def _complain(text: str) -> None:
    print(f"torchlens: {text}", file=sys.stderr)


def _describe(error: Exception) -> str:
    text = str(error) if isinstance(error, TorchLensError) else repr(error)
    notes = getattr(error, "__notes__", [])
    return "\n".join([text, *notes])


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(chain, OSError) and chain.errno == errno.ENOMEM:
            return True
        # What torch's allocator for the CPU raises has no type of its own.
        if isinstance(chain, RuntimeError) and "DefaultCPUAllocator" in str(chain):
            return True
        chain = chain.__cause__
    return False


def _parser() -> argparse.ArgumentParser:
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
    _add_layers(commands)
    _add_plan(commands)
    _add_extract(commands)
    _add_info(commands)
    _add_verify(commands)
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
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
        help='name of torchvision weights, "none", or a file of a state dict',
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


def _add_layers(commands: Any) -> None:
    text = "List the sites of a model with their shapes and cost."
    parser = _command(commands, "layers", _layers, text)
    _add_model(parser)
    _add_example(parser)
    parser.add_argument("--ops", action="store_true", help="single operations too")


def _add_plan(commands: Any) -> None:
    text = "Plan a capture: prove what each layer gives, and print or save it."
    parser = _command(commands, "plan", _plan, text)
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


def _add_extract(commands: Any) -> None:
    text = "Extract layers for a dataset into a store; run again to go on."
    parser = _command(commands, "extract", _extract, text)
    _add_model(parser)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("-o", "--output", metavar="STORE", required=True)
    _add_chosen(parser, required=False)
    parser.add_argument("--plan", metavar="FILE", help="a saved plan, for --layers")
    _add_reading(parser)
    parser.add_argument("--batch-size", type=int, metavar="N")
    parser.add_argument("--num-workers", type=int, default=0, metavar="N")
    parser.add_argument("--block-rows", type=int, metavar="N")
    parser.add_argument("--ids", metavar="COLUMN", help="entry or column with the ids")
    parser.add_argument("--metadata", metavar="FILE", help="CSV with one line a row")
    parser.add_argument("--preprocess", metavar="TEXT", help="part of the identity")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--max-bytes", type=float, metavar="N")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    parser.add_argument("--on-error", choices=["raise", "skip"], default="raise")
    parser.add_argument(
        "--on-divergence", choices=["raise", "retrace"], default="raise"
    )
    parser.add_argument(
        "--nonfinite", choices=["keep", "raise", "saturate"], default="keep"
    )
    parser.add_argument("-q", "--quiet", action="store_true")


def _add_info(commands: Any) -> None:
    text = "Say what a store holds."
    parser = _command(commands, "info", _info, text)
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--json", action="store_true", help="everything that is known")


def _add_verify(commands: Any) -> None:
    text = "Compare a store with its commit records."
    parser = _command(commands, "verify", _verify, text)
    parser.add_argument("store", metavar="STORE")
    parser.add_argument("--deep", action="store_true", help="read every byte")


def _layers(arguments: argparse.Namespace) -> int:
    from .command_inputs import example_of, model_of
    from .site_tables import module_table, op_table

    model = model_of(arguments)
    inputs = example_of(arguments, model)
    print(op_table(model, inputs) if arguments.ops else module_table(model, inputs))
    return DONE


def _plan(arguments: argparse.Namespace) -> int:
    from torchlens.planner import plan

    from .command_inputs import example_of, model_of

    model = model_of(arguments)
    made = plan(
        model, example_of(arguments, model), arguments.layers, dtype=arguments.dtype
    )
    print(made.summary())
    if arguments.rows:
        print(f"forecast: {made.forecast(arguments.rows)}")
    if arguments.output:
        with open(arguments.output, "w") as file:
            file.write(made.to_json())
        _complain(f"the plan is in {arguments.output}")
    return DONE


def _extract(arguments: argparse.Namespace) -> int:
    from .command_inputs import dataset_of, inputs_of, layers_of, metadata_of, model_of
    from .engine import extract_dataset

    model = model_of(arguments)
    dataset, transform = dataset_of(arguments)
    store = extract_dataset(
        model,
        dataset,
        layers_of(arguments),
        output_dir=arguments.output,
        batch_size=arguments.batch_size,
        ids=arguments.ids,
        metadata=metadata_of(arguments),
        inputs=inputs_of(arguments),
        transform=transform,
        num_workers=arguments.num_workers,
        dtype=arguments.dtype,
        block_rows=arguments.block_rows,
        overwrite=arguments.overwrite,
        max_bytes=None if arguments.max_bytes is None else int(arguments.max_bytes),
        on_divergence=arguments.on_divergence,
        on_error=arguments.on_error,
        nonfinite=arguments.nonfinite,
        preprocess=arguments.preprocess,
        time_limit=arguments.time_limit,
        progress=not arguments.quiet,
    )
    print(store.zarr_path)
    return DONE


def _info(arguments: argparse.Namespace) -> int:
    from torchlens.storage import open_store

    from .site_tables import store_table

    store = open_store(arguments.store, allow_partial=True)
    info = store.info()
    print(json.dumps(info, indent=1) if arguments.json else store_table(info))
    return DONE


def _verify(arguments: argparse.Namespace) -> int:
    from torchlens.storage import open_store

    report = open_store(arguments.store, allow_partial=True).verify(deep=arguments.deep)
    print(report.summary())
    return DONE if report.ok else FAILED
