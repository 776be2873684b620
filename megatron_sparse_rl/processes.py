"""Start the ranks of a run on this machine, wait for them, and leave nothing behind.

In: the command line of one rank and their number. Out: an exit status; a failure is told once, as the failing
rank's sentence (SettingError) or its traceback. Ranks are started by torch's elastic agent, whose store
listens on a free port of the loopback interface, so that two runs on one machine never share a port.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from megatron_sparse_rl.settings import SettingError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

EXIT_FAILURE = 1
EXIT_SETTING = 2
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set for each rank by the elastic agent, which reads the file back

# prctl(2)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def start_ranks(command: Sequence[str], count: int) -> int:
    """Run `command` as `count` ranks under torchrun's environment; returns the exit status of the whole.

    0: every rank succeeded; 2: a rank refused a setting; 1: any other failure; 128 + n: ended by signal n.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_agent()
    # What a dying rank leaves behind becomes a child of this process, and can be found and ended.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    others = set(psutil.Process().children(recursive=True))
    with tempfile.TemporaryDirectory(prefix="megatron-sparse-rl-") as folder:
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(launch, command[0])(*command[1:])
        except ChildFailedError as error:
            return _tell(error.failures)
        except SignalException as error:
            print(f"ended by {signal.Signals(error.sigval).name}", file=sys.stderr)
            return 128 + int(error.sigval)
        finally:
            _end(set(psutil.Process().children(recursive=True)) - others)
    return 0


def record_failure(error: BaseException) -> bool:
    """Write `error` where the launcher of this rank looks for it; False when no launcher asked for it.

    Call it in the `except` block. The form is that of torch's elastic agent, with the kind of error and a
    clock fine enough to tell a cause from its consequences in other ranks.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    told = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))},
        },
        "setting_error": str(error) if isinstance(error, SettingError) else None,
        "monotonic_ns": time.monotonic_ns(),
    }
    # In one rename: another rank's failure may end this process at any moment, and half a record hides both.
    beside = f"{path}.{os.getpid()}"
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(told, file)
    os.replace(beside, path)
    return True


def leave(status: int) -> NoReturn:
    """End a failed rank now, with its children and without Python's own way out.

    That way runs destructors and joins threads that wait for ranks which may be gone: the process would hang,
    or abort and hide the reason.
    """
    _end(psutil.Process().children(recursive=True))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its launcher dies, even by SIGKILL."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _tell(failures: "dict[int, ProcessFailure]") -> int:
    """Print the failure that caused the others and return its exit status."""
    rank, failure = min(failures.items(), key=lambda item: _precedence(item[1]))
    told: dict[str, Any] = failure.error_file_data
    if told.get("setting_error"):
        print(f"error: {told['setting_error']}", file=sys.stderr)
        return EXIT_SETTING
    if "monotonic_ns" in told:
        print(told["message"]["extraInfo"]["py_callstack"].rstrip(), file=sys.stderr)
        print(f"error: rank {rank} failed: {told['message']['message']}", file=sys.stderr)
    elif failure.exitcode < 0:
        name = failure.signal_name()
        hint = "; the machine may be out of memory (see dmesg)" if name == "SIGKILL" else ""
        print(f"error: rank {rank} was killed by {name}{hint}", file=sys.stderr)
    else:
        print(
            f"error: rank {rank} ended with exit code {failure.exitcode}; see its output above",
            file=sys.stderr,
        )
    return EXIT_FAILURE


def _precedence(failure: "ProcessFailure") -> tuple[int, int]:
    """The smallest is the cause: a refused setting, then a rank that died by a signal or without a word, then
    recorded errors in their order. SIGTERM comes last, since the agent ends the ranks that are left with it.
    """
    told: dict[str, Any] = failure.error_file_data
    if told.get("setting_error"):
        return 0, 0
    if "monotonic_ns" in told:
        return 2, told["monotonic_ns"]
    return (3, 0) if failure.exitcode == -signal.SIGTERM else (1, 0)


def _end(processes: Iterable[psutil.Process]) -> None:
    """Terminate, then kill, processes that ranks left running."""
    alive = list(processes)
    for process in alive:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(alive, timeout=5)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=5)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # ended by itself meanwhile


def _quiet_agent() -> None:
    """The agent's own warnings about ranks repeat what `_tell` says in one sentence."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {argument}) failed")
