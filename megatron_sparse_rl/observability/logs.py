"""Where log lines go: standard error, one line an event.

In: the process's rank. Out: handlers of the standard library's logging.
"""

import logging
import warnings

PACKAGE = "megatron_sparse_rl"

# What Megatron-core says at import where Transformer Engine and Apex are missing, which `doctor` reports, and
# about a default of its own; regular expressions of the message's beginning.
KNOWN_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
)


def configure_logging(rank: int | None = None) -> None:
    """Send log lines to standard error: this package's from INFO up on rank 0 or outside a run (None), and
    from WARNING up on other ranks, whose lines name the rank; other packages' from WARNING up. The
    known harmless Python warnings are silenced.
    """
    where = "" if rank is None else f" [rank {rank}]"
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s{where} %(name)s: %(message)s", datefmt="%H:%M:%S", force=True
    )
    logging.getLogger(PACKAGE).setLevel(logging.WARNING if rank else logging.INFO)
    for beginning in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=beginning)
