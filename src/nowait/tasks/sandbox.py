"""Python programs that a model wrote, run where they can do little harm: a process of their own, its limits, and an end that comes for sure.

| what a program may not do | Linux (x86-64, arm64) | macOS |
|---|---|---|
| use the network | no sockets (seccomp) | `sandbox-exec` |
| start processes, threads or other programs | refused (seccomp) | `sandbox-exec`; threads are possible |
| signal, trace or slow down other processes | refused (seccomp, Landlock) | signals to other processes (`sandbox-exec`) |
| read files | only its folder, Python's library and /usr/lib (Landlock) | **not contained**: all that you may read |
| write files | only its folder (Landlock), 1 MB a file, 64 MB together | only its folder (`sandbox-exec`), likewise |
| run on | seconds of processor time (rlimit), three times as many on the wall clock | the same |
| take memory | address space (rlimit) | **not contained** |

On both: 1 MB of output, an environment without your variables, open files closed, a temporary folder (without folders in it) that is deleted
afterwards, and a kill of the process group at the end. It needs no root and no container; under root the process drops its capabilities first.
What the system lacks (an older kernel, another processor) is said once. A program sees Python's standard library only. Names, sizes and times of
files elsewhere (`stat`) are not hidden. The tests run beside the program: they tell wrong programs from right ones, and cannot stop one that sets
out to deceive them.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import resource
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from typing import NamedTuple

OUTPUT, DISK = 2**20, 2**26  # bytes: of the output and of each file; of all files together
# System calls that reach other processes, the network, or what Landlock does not guard (owners, modes and times of files): x86-64, arm64.
DENIED = """
socket 41 198  socketpair 53 199  clone 56 220  fork 57 -  vfork 58 -  execve 59 221  execveat 322 281  kill 62 129  tkill 200 130  tgkill 234 131
rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240  ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  kcmp 312 272
setpriority 141 140  ioprio_set 251 30  sched_setparam 142 118  sched_setscheduler 144 119  sched_setattr 314 274  sched_setaffinity 203 122
migrate_pages 256 238  move_pages 279 239  setrlimit 160 164  prlimit64 302 261  unshare 272 97  setns 308 268  bpf 321 280  userfaultfd 323 282
perf_event_open 298 241  add_key 248 217  request_key 249 218  keyctl 250 219  shmget 29 194  semget 64 190  msgget 68 186  mq_open 240 180
memfd_create 319 279  truncate 76 45  chmod 90 -  fchmod 91 52  fchmodat 268 53  chown 92 -  lchown 94 -  fchown 93 55  fchownat 260 54
setxattr 188 5  lsetxattr 189 6  fsetxattr 190 7  removexattr 197 14  lremovexattr 198 15  fremovexattr 199 16
utime 132 -  utimes 235 -  futimesat 261 -  utimensat 280 88
""".split()
NEWER = 424  # system calls from this number on are the same on all processors: none is needed, and clone3, io_uring and pidfds are among them
MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column of DENIED, audit number
APPLE = """(version 1)(allow default)(deny network*)(deny process-fork)(deny signal)(allow signal (target self))
(deny file-write*)(allow file-write* (subpath "{folder}") (literal "/dev/null"))"""


class SandboxFailed(RuntimeError):
    """The sandbox could not be set up, whatever the program."""


class Result(NamedTuple):
    passed: bool  # it ran to its end without an exception, within the limits
    output: str  # the end of what it printed, with the traceback


def run(program: str, *, seconds: int = 3, memory: int = 2**29) -> Result:
    """Run a program; `seconds` of processor time, `memory` in bytes. Raises SandboxFailed where the sandbox itself does not work."""
    started, passed = secrets.token_hex(8), secrets.token_hex(8)
    with (
        tempfile.TemporaryDirectory(prefix="nowait-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as out,
        _job(program=program, folder=folder, seconds=seconds, memory=memory, started=started, passed=passed) as job,
    ):
        python = [os.path.realpath(sys.executable), "-s", "-S", "-P", "-B", __file__]
        apple = ["sandbox-exec", "-p", APPLE.format(folder=os.path.realpath(folder))] if sys.platform == "darwin" else []
        environment = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # some Pythons do not start without
        process = subprocess.Popen(
            apple + python, stdin=job, stdout=out, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
        )
        try:
            _watch(process, folder, time.monotonic() + 3 * seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        head, _, text = out.read().decode(errors="replace").partition("\n")
    mark, _, missing = head.partition(" ")
    if mark != started:
        raise SandboxFailed(f"the sandbox could not be set up: {head} {text[-1000:]}")
    _say_missing(missing)
    return Result(process.returncode == 0 and text.endswith(passed), text.removesuffix(passed)[-2000:])


def _job(**job):
    file = tempfile.TemporaryFile()
    file.write(json.dumps(job).encode())
    file.seek(0)
    return file


def _watch(process: subprocess.Popen, folder: str, deadline: float) -> None:
    """Until the process ends, its time is over, or its files are too large together."""
    while time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            return
        with suppress(FileNotFoundError):  # deleted meanwhile
            if sum(file.stat(follow_symlinks=False).st_size for file in os.scandir(folder)) > DISK:
                return


@functools.cache
def _say_missing(missing: str) -> None:
    if missing:
        warnings.warn(f"programs of a model run with less protection than on a current Linux; missing: {missing}", stacklevel=3)


def _contain(folder: str, seconds: int, memory: int) -> list[str]:
    """Give up for good what a program must not have. Returns the means that this system lacks."""
    limits = {"CPU": seconds, "AS": memory, "FSIZE": OUTPUT, "NOFILE": 64, "CORE": 0}
    missing = []
    for name, limit in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        except (OSError, ValueError):  # memory, on macOS
            missing.append(f"limit {name}")
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with who started it
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: what follows needs no root, and nothing gives rights back
        libc.capset(struct.pack("II", 0x20080522, 0), bytes(24))  # no capabilities, where root starts this
        missing += [] if _landlock(libc, folder) else ["Landlock (files)"]
        missing += [] if _seccomp(libc) else ["seccomp (network, processes)"]
    return missing


def _landlock(libc, folder: str) -> bool:
    """Only the folder can be written to; only it and Python's library can be read. Linux 5.13."""
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = (1 << {1: 13, 2: 14}.get(version, 15)) - 1  # of files, as far as this kernel knows them
    rules = libc.syscall(444, struct.pack("Q", rights), ctypes.c_size_t(8), 0)
    read, write = 0b1100, rights & ~0b10000001  # files and folders; all but executing them and making folders in them
    places = {os.path.realpath(path): read for path in (sys.base_prefix, sys.base_exec_prefix, "/usr/lib", "/lib", "/lib64", "/usr/share/zoneinfo")}
    places |= {folder: write, "/dev/null": 0b110, "/dev/urandom": 0b100}
    for path, allowed in places.items():
        with suppress(FileNotFoundError):
            opened = os.open(path, os.O_PATH)
            if libc.syscall(445, rules, 1, struct.pack("=Qi", allowed, opened), 0):
                return False
            os.close(opened)
    done = libc.syscall(446, rules, 0) == 0
    os.close(rules)
    return done


def _seccomp(libc) -> bool:
    """Refuse the system calls in DENIED and the newer ones."""
    if platform.machine() not in MACHINES:
        return False
    column, audit = MACHINES[platform.machine()]
    numbers = [int(number) for number in DENIED[column::3] if number != "-"]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # instructions of the kernel's filter language
    refuse, absent = 0x00050001, 0x00050026  # errors EPERM and ENOSYS, which the C library answers with an older call
    code = [(load, 0, 0, 4), (equal, 1, 0, audit), (give, 0, 0, refuse), (load, 0, 0, 0), (at_least, 0, 1, NEWER), (give, 0, 0, absent)]
    for number in numbers:
        code += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in [*code, (give, 0, 0, 0x7FFF0000)]))
    return libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(code) + 1, ctypes.addressof(filters)), 0, 0) == 0  # PR_SET_SECCOMP, filter


def _main() -> None:
    """In the process of the program, which stands on standard input."""
    job = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    missing = _contain(job["folder"], job["seconds"], job["memory"])
    os.write(1, f"{job['started']} {', '.join(missing)}\n".encode())
    exec(compile(job["program"], "program.py", "exec"), {"__name__": "program"})  # not __main__: what a script does at its end is not asked for
    sys.stdout.flush()
    os.write(1, job["passed"].encode())
    os._exit(0)


if __name__ == "__main__":
    _main()
