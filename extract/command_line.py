"""The command line: parse, call one function, print.

Results go to standard output; progress, notes and errors to standard error.
"""

import argparse
import errno
import json
import sys
from collections.abc import Sequence

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

from .command_parser import (
    BAD_INPUT,
    DONE,
    FAILED,
    INTERRUPTED,
    OUT_OF_MEMORY,
    make_parser,
)
from .interrupts import REQUEUE_CODE, RequeueExit

__all__ = ["main"]

_BAD_INPUT = (
    BudgetError,
    DataError,
    InputError,
    ModelError,
    PlanError,
    ResumeError,
    SelectorError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    runs = {
        "layers": _layers,
        "plan": _plan,
        "extract": _extract,
        "info": _info,
        "verify": _verify,
    }
    arguments = make_parser(runs).parse_args(argv)
    try:
        code: int = arguments.command(arguments)
        return code
    except BrokenPipeError:
        # Whoever read the output has had enough, such as `head`.
        sys.stdout = None
        return DONE
    except RequeueExit as stop:
        _complain(str(stop))
        return REQUEUE_CODE
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        _complain("interrupted; run the same command again to go on.")
        return INTERRUPTED
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
