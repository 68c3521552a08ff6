"""Equality of mathematical answers by math-verify, in a process of its own.

math-verify limits its time by alarm signals, which work in the main thread only, and which arithmetic on huge integers outlasts. Here the alarm
ends the process, whatever it computes, and the next question starts another one.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from nowait.tasks.graders import NUMBER, boxed, number, text

LIMIT, MEMORY = 3.0, 2**32  # seconds per comparison, bytes
MARKED = re.compile(r"(?<!\\)\$|\\boxed")  # an answer within a text
log = logging.getLogger(__name__)
_lock, _process = threading.Lock(), None

if importlib.util.find_spec("math_verify") is None:
    raise ImportError("math answers are graded by math-verify: pip install 'nowait-rl[data]'")


def by_answer(completions, answer, **columns) -> list[float]:
    """A reward function as TRL's: 1.0 where a response's answer equals that in the column `answer`."""
    return [float(equal(str(gold), text(completion))) for completion, gold in zip(completions, answer, strict=True)]


def by_solution(completions, solution, **columns) -> list[float]:
    """The same with the column `solution`."""
    return by_answer(completions, solution)


def equal(gold: str, response: str) -> bool:
    """Whether the answer in a response, which is its last `\\boxed{}` or what math-verify finds without one, equals `gold`.

    False where the response cannot be read, or not in time. Raises ValueError where `gold` has no answer that can be read.
    """
    answer = boxed(response)
    if answer is not None and NUMBER.fullmatch(gold) and NUMBER.fullmatch(answer.strip()):  # most are: no need to ask
        return number(gold) == number(answer)
    gold = gold if MARKED.search(gold) else rf"\boxed{{{gold}}}"
    response = response if answer is None else rf"\boxed{{{answer}}}"
    with _lock:
        reply = _ask(gold, response)
        if reply is None:
            if _ask(gold, "") is None:
                raise ValueError(f"the answer {gold!r} cannot be read within {LIMIT:g} s")
            log.warning("took more than %g s, so it counts as wrong: %r against %r", LIMIT, response[-200:], gold)
            return False
    if reply["gold"]:
        return reply["equal"]
    raise ValueError(f"no answer in {gold!r}")


def _ask(gold: str, response: str) -> dict | None:
    """None where the process ended over the question."""
    global _process
    if _process is None or _process.poll() is not None:
        path = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", __name__]
        _process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path})
        if not _process.stdout.readline():
            raise RuntimeError("the process that grades math answers could not start; see its message above")
    _process.stdin.write(json.dumps([gold, response]).encode() + b"\n")
    _process.stdin.flush()
    line = _process.stdout.readline()
    if line:
        return json.loads(line)
    _process.wait()
    return None


@atexit.register
def _stop() -> None:
    if _process:
        _process.kill()
        _process.communicate()


def _serve() -> None:
    """Answer questions on standard input until it ends, as it does when who asked is gone."""
    from math_verify import parse, verify

    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no reply
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asked
    with suppress(OSError, ValueError):  # as macOS has it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if not verify(parse(r"\boxed{\frac{1}{2}}", parsing_timeout=None), parse("$0.5$", parsing_timeout=None), timeout_seconds=None):
        sys.exit("math-verify does not read LaTeX here; pip install 'nowait-rl[data]' brings the versions that fit together")
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        gold, response = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
        known = parse(gold, parsing_timeout=None)
        same = bool(known) and verify(known, parse(response, parsing_timeout=None), timeout_seconds=None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"gold": bool(known), "equal": same}), file=replies, flush=True)


if __name__ == "__main__":
    _serve()
