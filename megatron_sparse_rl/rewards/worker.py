"""A reward worker: a process that scores answers, one at a time, until its pipe closes.

In: JSON messages on the pipe whose file descriptor is the only argument; the first is the reward settings,
each other one an answer. Out: one JSON message for each: that the verifiers are loaded, then scores and the
tracebacks of verifiers that raised. Nothing of torch, vLLM or Megatron is imported here, and what comes back
is data, never a pickle.
"""

import json
import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from megatron_sparse_rl.rewards.settings import RewardSettings
from megatron_sparse_rl.rewards.verifiers import Verifier, build_verifiers
from megatron_sparse_rl.settings import SettingError

# A worker that outlives its parent ends itself this long after its limit: SIGALRM's default action kills even
# where Python's interpreter no longer runs.
ORPHAN_GRACE_S = 30.0
TRACEBACK_CHARACTERS = 8000
# Sent to every process of a job by schedulers and terminals; the parent decides what they mean.
PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main(descriptor: int) -> None:
    os.set_inheritable(descriptor, False)  # processes that a verifier starts must not hold the pipe open
    os.dup2(2, 1)  # what verifiers print must not mix with the run's own output
    _take_signals()
    pipe = Connection(descriptor)
    settings = RewardSettings(**json.loads(pipe.recv_bytes()))
    _limit_memory(settings.memory_mib)
    signal.setitimer(signal.ITIMER_REAL, settings.startup_s + ORPHAN_GRACE_S)
    verifiers = _load(pipe, settings)
    while True:
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            answer = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, settings.timeout_s + ORPHAN_GRACE_S)
        _send(pipe, score(verifiers, answer))


def score(verifiers: dict[str, Verifier], answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{scores: by verifier, errors: traceback by verifier that raised, whose score is 0}."""
    scores: dict[str, float] = {}
    errors: dict[str, str] = {}
    for name, verifier in verifiers.items():
        try:
            scores[name] = verifier(
                answer["prompt"], answer["response"], answer["answer"], answer["metadata"]
            )
        except Exception:  # verifiers are the code of others: whatever they raise is counted and reported
            scores[name] = 0.0
            errors[name] = traceback.format_exc()[-TRACEBACK_CHARACTERS:]
    return {"scores": scores, "errors": errors}


def _load(pipe: Connection, settings: RewardSettings) -> dict[str, Verifier]:
    try:
        verifiers = build_verifiers(settings)
    except SettingError as error:
        _send(pipe, {"refused": str(error)})
        sys.exit(1)
    _send(pipe, {"ready": sorted(verifiers)})
    return verifiers


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(message).encode())


def _take_signals() -> None:
    """Leave the parent's signals to the parent, and make sure that SIGALRM ends this process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _limit_memory(memory_mib: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = memory_mib * 2**20
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]))
