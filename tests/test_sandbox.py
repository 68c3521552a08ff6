"""Programs that try to get out. What each would leave behind is looked for afterwards."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from nowait.tasks import sandbox
from nowait.tasks.sandbox import SandboxFailed, run

linux = pytest.mark.skipif(sys.platform != "linux", reason="seccomp and Landlock are Linux's")
REFUSED = ("PermissionError", "Operation not permitted", "can't start new thread")


def refused(program: str) -> bool:
    result = run(program, seconds=1)
    return not result.passed and any(word in result.output for word in REFUSED)


def test_a_program_passes_when_it_ends_without_an_exception():
    assert run("import math, json, re, collections\nassert math.comb(4, 2) == 6\nprint('seen')") == (True, "seen\n")
    result = run("assert 1 == 2, 'not equal'")
    assert not result.passed and "AssertionError: not equal" in result.output


@pytest.mark.parametrize("early", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_ending_early_is_not_passing(early):
    assert not run(f"{early}\nassert False", seconds=1).passed


def test_a_script_s_own_main_is_not_run():
    assert run("if __name__ == '__main__':\n    raise SystemExit(input())").passed


def test_a_program_finds_a_folder_of_its_own_which_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run("import os\nopen('a.txt', 'w').write('x' * 10)\nassert open('a.txt').read() == 'x' * 10\nprint(os.getcwd())")
    assert result.passed and Path(result.output.strip()).parent == tmp_path.resolve() and list(tmp_path.iterdir()) == []


def test_the_environment_has_no_secrets(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    result = run("import os\nprint(sorted(os.environ))\nprint(open(f'/proc/{os.getppid()}/environ').read() if os.path.exists('/proc/1') else '')")
    assert "HOME" in result.output and "SECRET" not in result.output and "hunter2" not in result.output


@pytest.mark.parametrize("program", ["while True: pass", "import signal\nsignal.signal(signal.SIGXCPU, lambda *a: None)\nwhile True: pass"])
def test_an_endless_loop_ends(program):
    start = time.monotonic()
    assert not run(program, seconds=1).passed and time.monotonic() - start < 5


def test_sleeping_ends(monkeypatch):
    start = time.monotonic()
    assert not run("import time; time.sleep(60)", seconds=1).passed and time.monotonic() - start < 5


@linux
def test_memory_is_limited():
    result = run("x = bytearray(10**9)")
    assert not result.passed and "MemoryError" in result.output
    assert run("x = bytearray(10**8)").passed


def test_endless_output_ends_and_is_not_kept():
    result = run("while True: print('x' * 10_000)", seconds=1)
    assert not result.passed and len(result.output) <= 2000


def test_a_huge_file_ends_early():
    assert "File too large" in run("open('a', 'wb').write(b'x' * 10**7)").output
    result = run("for i in range(10**6): open(str(i), 'wb').write(b'x' * 10**6)", seconds=2)
    assert not result.passed and "File too large" not in result.output  # killed by the sum


@linux
def test_no_process_is_started():
    start = time.monotonic()
    assert refused("import os\nwhile True: os.fork()") and time.monotonic() - start < 5
    assert refused("import subprocess\nsubprocess.run(['/bin/ls'])")
    assert refused("import threading\nthreading.Thread(target=print).start()")
    assert refused("import os\nos.execv('/bin/ls', ['ls'])")
    assert not run("import os\nassert os.system('exit 0') == 0").passed


@linux
def test_nothing_stays_behind(tmp_path):
    mark = f"left-behind-{os.getpid()}"
    daemon = f"import os, time\ntry:\n    if os.fork() == 0:\n        os.setsid()\nexcept OSError: pass\nopen('{mark}', 'w')\ntime.sleep(30)"
    run(daemon, seconds=1)
    held = [link for process in Path("/proc").glob("[0-9]*") for link in _open_files(process) if mark in link]
    assert held == []


def _open_files(process: Path) -> list[str]:
    try:
        return [os.readlink(fd) for fd in (process / "fd").iterdir()] + [os.readlink(process / "cwd")]
    except OSError:
        return []


@linux
def test_files_outside_are_neither_read_nor_written(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    for reading in (f"print(open({str(secret)!r}).read())", f"import os\nos.symlink({str(secret)!r}, 'link')\nprint(open('link').read())"):
        assert refused(reading)
    assert refused("print(open('/etc/passwd').read())") and refused("import os\nprint(os.listdir('..'))")
    for writing in ("open(path, 'w')", "os.remove(path)", "os.rename(path, 'mine')", "os.chmod(path, 0)", "os.truncate(path, 0)", "os.utime(path)"):
        assert refused(f"import os\npath = {str(secret)!r}\n{writing}")
    assert refused(f"open({str(tmp_path / 'new')!r}, 'w')")
    assert secret.read_text() == "hunter2" and list(tmp_path.iterdir()) == [secret]


def test_no_socket_is_opened():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        assert not run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)", seconds=1).passed
        with pytest.raises(TimeoutError):
            server.accept()


@linux
def test_other_processes_are_out_of_reach():
    killed = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *a: killed.set())
    try:
        assert refused("import os, signal\nos.kill(os.getppid(), signal.SIGTERM)")
        assert refused("import os, signal\nos.killpg(os.getpgid(os.getppid()), signal.SIGTERM)")
        assert refused("import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)")
        assert refused("import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not killed.is_set()


@linux
def test_root_s_rights_are_gone():
    assert refused("import os\nos.setuid(12345)" if os.geteuid() == 0 else "import os\nos.setuid(0)")
    assert refused("import os\nos.chroot('.')")
    assert not run("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (100, 100))").passed


def test_a_sandbox_that_does_not_work_is_no_wrong_program(monkeypatch):
    monkeypatch.setattr(sandbox, "__file__", "/nowhere/sandbox.py")
    with pytest.raises(SandboxFailed, match="could not be set up: .*nowhere"):
        run("pass")


def test_what_is_missing_is_said_once(recwarn):
    sandbox._say_missing.cache_clear()
    for _ in range(2):
        sandbox._say_missing("seccomp (network, processes)")
    sandbox._say_missing("")
    assert [str(warning.message) for warning in recwarn.list] == [
        "programs of a model run with less protection than on a current Linux; missing: seccomp (network, processes)"
    ]


@linux
def test_this_system_lacks_nothing(recwarn):
    sandbox._say_missing.cache_clear()
    assert run("pass").passed and recwarn.list == []
