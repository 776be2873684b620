"""Where log lines go: standard error, one line an event.

In: the process's rank. Out: handlers of the standard library's logging.
"""

import logging
import warnings

PACKAGE = "megatron_sparse_rl"
EACH_RANKS_OWN = "megatron_sparse_rl.rewards"  # its events differ from rank to rank

# What Megatron-core says at import where Transformer Engine and Apex are missing, which `doctor` reports, and
# about a default of its own; what torch says of the class and the function that Megatron's checkpoints use.
# Regular expressions of the message's beginning.
KNOWN_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "Please use DTensor instead",
    "`load_state_dict` is deprecated",
)


def configure_logging(rank: int | None = None) -> None:
    """Send log lines to standard error: this package's from INFO up on rank 0 or outside a run (None).

    Other ranks repeat what rank 0 says, so from them come errors only, and the warnings of the reward
    workers, which each rank has for itself; their lines name the rank. Other packages' lines come from
    WARNING up. The known harmless Python warnings are silenced.
    """
    where = "" if rank is None else f" [rank {rank}]"
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s{where} %(name)s: %(message)s", datefmt="%H:%M:%S", force=True
    )
    logging.getLogger(PACKAGE).setLevel(logging.ERROR if rank else logging.INFO)
    logging.getLogger(EACH_RANKS_OWN).setLevel(logging.WARNING if rank else logging.NOTSET)
    for beginning in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=beginning)
