"""List the checkpoints of a run: step, layout, model, sizes, whether the files are as they were written.

    .venv/bin/python tools/inspect_checkpoint.py runs/demo
    .venv/bin/python tools/inspect_checkpoint.py runs/demo/checkpoints/step_000020 --sizes-only

In: an output folder or one checkpoint. Out: a line for each, and the newest that a run would go on from. The
exit status is 0 when every checkpoint is intact, 1 when one is damaged, 2 when there is none.
"""

import argparse
import sys
from pathlib import Path

from megatron_sparse_rl.learner.checkpoint_folder import checkpoint_root, unfinished_checkpoints
from megatron_sparse_rl.learner.checkpoint_summary import Summary, find_checkpoints, summarise
from megatron_sparse_rl.learner.parallel import single_process
from megatron_sparse_rl.settings import SettingError


def describe(summary: Summary) -> str:
    if summary.damage:
        return f"{summary.folder}: DAMAGED, {summary.damage}"
    return (
        f"{summary.folder}: step {summary.step}, {summary.layout}; {summary.model}; learner "
        f"{_size(summary.learner_bytes)}, other {_size(summary.other_bytes)}; intact"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "path", type=Path, help="output_dir of a run, or one of its checkpoints/step_... folders"
    )
    parser.add_argument(
        "--sizes-only", action="store_true", help="do not read the files, compare their sizes"
    )
    options = parser.parse_args(arguments)
    try:
        folders = find_checkpoints(options.path)
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with single_process():
        summaries = [summarise(folder, digests=not options.sizes_only) for folder in folders]
    for summary in summaries:
        print(describe(summary))
    for folder in unfinished_checkpoints(checkpoint_root(options.path)):
        print(f"{folder}: not finished, ignored by runs")
    intact = [summary for summary in summaries if not summary.damage]
    print(f"newest intact: {intact[-1].folder if intact else 'none'}")
    return 0 if len(intact) == len(summaries) else 1


if __name__ == "__main__":
    sys.exit(main())
