"""The first process of a sandbox: runs the program on each input, enforces the limits, and reports the result. Started by pool.py.

It is process 1 of its own PID namespace. When it ends, the kernel kills everything left in the namespace. Signals from the program
do not reach it. The program cannot read or write its memory (it is not dumpable), and cannot change its limits or its priority
(syscalls.py). The pool still does not trust it: it runs under the same filter, never sees an expected answer, and the pool reads
its output as bytes of a bounded length.

Without isolation (isolation="limits" in pool.py) it is an ordinary process. It finds and kills the program's descendants itself.

Runs in an interpreter without `site`, and imports little, because it starts dozens of times a second. Importing ctypes and signal
would take a third of the start-up time, so it uses the C modules below them.
"""
# ruff: noqa: SIM105, SIM115 - contextlib is slow to import, and the program's streams stay open

from __future__ import annotations

import _ctypes
import _signal as signal  # type: ignore[import-not-found]
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any, NoReturn

    Job = Mapping[str, Any]  # pool.py's description of a program
    Processes = list[tuple[int, list[bytes]]]

_POLL_S = 0.02
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER, _PR_SET_THP_DISABLE = 4, 38, 36, 41
_SET_FILTER, _NEW_LISTENER = 1, 8
_HEADER_BYTES = 8
_MAX_JOB = 256_000_000
_CHUNK = 1 << 16
_FIRST_UID = 0x60000000  # plus the PID namespace's number: an unused user id, different for each concurrent sandbox
_NOBODY = 65534
_KILL_ROUNDS = 50
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SHARED = "/dev/shm"
# The usual net.core.wmem_default, used if the kernel's value cannot be read. The filter refuses larger buffers. A queue may exceed
# its buffer by one message
_QUEUE_BYTES = 212_992
# Kernel memory, rounded up from what was measured (docs/design/security.md)
_INODE_BYTES = 2048  # a file without content, with its name
_MAPPING_BYTES = 512  # a mapping (a line of /proc/PID/maps)
_TABLE_SHARE = 512  # page tables take at most this part of the mapped bytes
_USUAL_MAPPINGS = 65_530  # vm.max_map_count, used if the kernel's value cannot be read

_most_mappings = 0  # of a process; 0: not read yet

ENDED, CPU_TIME, WALL_TIME, MEMORY, PROCESSES, OUTPUT = range(6)


def main(control: int) -> None:
    """Serve one program: set up once, then run one input after another until the other end closes the socket."""
    # Process 1 of a namespace receives SIGINT only if it has a handler, so remove Python's handler
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    setup = marshal.loads(read_message(control))
    alone = setup["alone"]
    if alone and os.getuid() == 0:
        become_nobody()
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    call("prctl", _PR_SET_THP_DISABLE, 1, 0, 0, 0)  # of a huge page, a process may keep 4 kB mapped, and hold 2 MB
    if not alone:
        call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    listener = install(setup)
    os.write(control, b"T" if listener >= 0 else b"U")
    if listener >= 0:
        send_fd(control, listener)
        os.close(listener)
    program = marshal.loads(read_message(control))
    os.write(control, b"L")
    while True:
        given = read_message(control)
        result, out, err = run(control, program, given, alone)
        header = b"".join(int(number).to_bytes(8, "little", signed=True) for number in (*result, len(out), len(err)))
        write_all(control, header + out + err)


def run(control: int, program: Job, given: bytes, alone: bool) -> tuple[tuple[float, ...], bytes, bytes]:
    """Run the program on one input. Returns (what ended it, exit code, number of processes left running, CPU time and wall time
    in microseconds), stdout, stderr. alone: the sandbox is isolated, so every other process that it sees is the program's."""
    fresh_scratch(program["scratch"], program["files"])
    if alone:  # without isolation, _SHARED is the machine's own folder
        empty(_SHARED)
    spent = children_cpu_s()
    start = time.monotonic()
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.dup2(in_read, 0)
            os.dup2(out_write, 1)
            os.dup2(err_write, 2)
            os.closerange(3, 1024)
            call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise root would own the program's files in /proc
            be_program(program)
        finally:
            os._exit(125)
    for fd in (in_read, out_write, err_write):
        os.close(fd)
    for fd in (in_write, out_read, err_read):
        os.set_blocking(fd, False)
    watch = select.poll()
    exited = os.pidfd_open(child)
    watch.register(exited, select.POLLIN)
    watch.register(out_read, select.POLLIN)
    watch.register(err_read, select.POLLIN)
    watch.register(control, select.POLLHUP)
    if given:
        watch.register(in_write, select.POLLOUT)
    else:
        os.close(in_write)
    outputs = {out_read: bytearray(), err_read: bytearray()}
    room = program["output_bytes"]
    why = ENDED
    looked = 0.0
    alive = True
    while alive and why == ENDED:
        for fd, event in watch.poll(_POLL_S * 1000):
            if fd == control:
                if event & (select.POLLHUP | select.POLLERR):
                    end_all(child, alone)  # the pool has closed the socket: end the whole sandbox
                    os._exit(0)
            elif fd == exited:
                alive = False
            elif fd == in_write:
                given = feed(watch, in_write, given)
            elif not drain(fd, outputs[fd], room):
                if len(outputs[fd]) > room:
                    why = OUTPUT
                else:
                    watch.unregister(fd)
        now = time.monotonic()
        if alive and why == ENDED and now - looked >= _POLL_S:
            looked = now
            why = over_limit(program, alone, now - start, spent)
    if given:
        os.close(in_write)
    left, status = end_all(child, alone)
    for fd, found in outputs.items():
        while len(found) <= room and drain(fd, found, room):  # terminates, because all writers are gone
            pass
        if why == ENDED and len(found) > room:
            why = OUTPUT
        os.close(fd)
    os.close(exited)
    code = os.waitstatus_to_exitcode(status)
    cpu_s = children_cpu_s() - spent
    if why == ENDED and code == -signal.SIGXCPU:
        why = CPU_TIME
    result = (why, code, left, cpu_s * 1e6, (time.monotonic() - start) * 1e6)
    return result, bytes(outputs[out_read][:room]), bytes(outputs[err_read][:room])


# -------------------------------------------------------------------------------------------------------------- watching


def over_limit(program: Job, alone: bool, wall_s: float, spent: float) -> int:
    """The limit that the program's processes together have exceeded on this input (PROCESSES: reached), or ENDED if none."""
    if wall_s > program["wall_s"]:
        return WALL_TIME
    tasks, most, cpu_s = 0, 0, children_cpu_s() - spent
    for _, fields in others(alone):
        tasks += int(fields[17])
        most += int(fields[21]) * _PAGE + mapping_bytes(fields)
        cpu_s += (int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])) / _TICK
    if cpu_s > program["cpu_s"]:
        return CPU_TIME
    if tasks >= program["processes"]:
        return PROCESSES
    room = program["memory_bytes"] - (kernel_bytes(program["scratch"]) if alone else 0)
    if most > room and held_bytes(alone) > room:
        return MEMORY
    return ENDED


def kernel_bytes(scratch: str) -> int:
    """Upper bound of the kernel memory that this sandbox uses: queues of its sockets, and its files besides their content."""
    with open("/proc/self/net/unix", "rb") as file:
        sockets = sum(1 for _ in file) - 1  # one line per socket, after a header line
    each = 2 * _QUEUE_BYTES
    try:
        with open("/proc/sys/net/core/wmem_default", "rb") as file:
            each = 2 * int(file.read())
    except OSError:
        pass  # some kernels show this file in the initial network namespace only
    files = 0
    for folder in (scratch, _SHARED):
        about = os.statvfs(folder)
        files += about.f_files - about.f_ffree
    return sockets * each + files * _INODE_BYTES


def mapping_bytes(fields: list[bytes]) -> int:
    """Upper bound of the kernel memory that describes a process's memory, from its /proc/PID/stat after the name."""
    global _most_mappings
    if not _most_mappings:
        try:
            with open("/proc/sys/vm/max_map_count", "rb") as file:
                _most_mappings = int(file.read())
        except OSError:
            _most_mappings = _USUAL_MAPPINGS
    mapped = int(fields[20])
    return min(mapped // _PAGE, _most_mappings) * _MAPPING_BYTES + mapped // _TABLE_SHARE


def held_bytes(alone: bool) -> int:
    """Memory of all processes, with shared pages counted once, and the kernel's memory that describes it. Expensive, so only called
    if an upper bound exceeds the limit."""
    total = 0
    for pid, fields in others(alone):
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                total += in_kb(file, b"Pss:")
            with open(f"/proc/{pid}/maps", "rb") as file:
                total += sum(1 for _ in file) * _MAPPING_BYTES
            with open(f"/proc/{pid}/status", "rb") as file:
                total += in_kb(file, b"VmPTE:")
        except (OSError, ValueError):  # not readable for this process: count shared pages in full
            total += int(fields[21]) * _PAGE + mapping_bytes(fields)
    return total


def in_kb(file: Iterable[bytes], name: bytes) -> int:
    """The bytes that a line `name: N kB` of a file in /proc tells."""
    return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def others(alone: bool) -> Processes:
    """(pid, fields of /proc/PID/stat after the name) of all other processes in the namespace; if not alone, of all descendants."""
    me = os.getpid()
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != me:
            try:
                with open("/proc/" + entry + "/stat", "rb") as file:
                    found[int(entry)] = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
    if alone:
        return list(found.items())
    family, grown = {me}, True
    while grown:
        more = {pid for pid, fields in found.items() if int(fields[1]) in family} - family
        family |= more
        grown = bool(more)
    return [(pid, fields) for pid, fields in found.items() if pid in family]


def end_all(child: int, alone: bool) -> tuple[int, int]:
    """Kill all remaining processes. Returns how many the program left running, and the program's wait status."""
    left = sum(1 for pid, fields in others(alone) if pid != child and fields[0] not in (b"Z", b"X"))
    status = None
    for _ in range(_KILL_ROUNDS):
        if alone:
            try:
                os.kill(-1, signal.SIGKILL)  # all at once, so that none escapes by forking
            except ProcessLookupError:
                pass
        else:
            for pid, _ in others(alone):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        try:
            while True:
                pid, ended = os.waitpid(-1, 0)
                if pid == child:
                    status = ended
        except ChildProcessError:
            break
    return left, 0 if status is None else status


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def feed(watch: select.poll, fd: int, given: bytes) -> bytes:
    try:
        given = given[os.write(fd, given[:_CHUNK]) :]
    except BlockingIOError:
        return given
    except BrokenPipeError:  # the program has closed its stdin
        given = b""
    if not given:
        watch.unregister(fd)
        os.close(fd)
    return given


def drain(fd: int, found: bytearray, room: int) -> bool:
    """Read what is available. Returns False at the end of the output, or if it exceeds `room`."""
    try:
        some = os.read(fd, _CHUNK)
    except BlockingIOError:
        return True
    found += some
    return bool(some) and len(found) <= room


# ------------------------------------------------------------------------------------------------------------ the program


def be_program(program: Job) -> None:
    limits = program["rlimits"]
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value if name != "RLIMIT_CPU" else value + 1))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    os.chdir(program["scratch"])
    command = program["command"]
    if command:
        try:
            os.execvpe(command[0], command, program["environment"])
        except OSError as error:
            os.write(2, f"{command[0]}: {error}\n".encode())
            os._exit(127)
    os.environ.clear()
    os.environ.update(program["environment"])
    be_python(program)


def be_python(program: Job) -> NoReturn:
    """Run main.py as `python main.py` would, without starting another interpreter."""
    import atexit
    import builtins

    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    path = os.path.join(program["scratch"], "main.py")
    sys.argv = [path]
    sys.path[:] = [program["scratch"], *program["packages"], *(entry for entry in sys.path if entry)]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    main_module = type(sys)("__main__")
    main_module.__file__ = path
    sys.modules["__main__"] = main_module
    code = 0
    try:
        with open(path, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec"), main_module.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code == 1 and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
    threading = sys.modules.get("threading")
    try:
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 120
    os._exit(code & 0xFF)


def fresh_scratch(scratch: str, files: Mapping[str, bytes]) -> None:
    """Empty the scratch folder and write the program's files to it. Does not follow links."""
    empty(scratch)
    for name, content in files.items():
        path = os.path.join(scratch, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o755)
        write_all(fd, content)
        os.close(fd)


def empty(folder: str) -> None:
    """Remove what is in a folder. Does not follow links. Moves folders up instead of going down, because a program may nest them
    more deeply than a path or a recursion can reach."""
    try:
        os.chmod(folder, 0o700)
    except OSError:
        pass  # the scratch folder itself may belong to another user
    moved, number = os.path.join(folder, os.urandom(8).hex()), 0
    while True:
        with os.scandir(folder) as entries:
            there = list(entries)
        if not there:
            return
        for entry in there:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            with os.scandir(entry.path) as entries:
                inside = list(entries)
            for inner in inside:
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # a move writes to the moved folder, too
                    number += 1
                    os.rename(inner.path, f"{moved}-{number}")
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)


# ----------------------------------------------------------------------------------------------------------------- set-up


def become_nobody() -> None:
    for uid in (_FIRST_UID + int(os.readlink("/proc/self/ns/pid")[5:-1]) % 0x1000000, _NOBODY):
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            return
        except OSError:
            continue  # this container's user namespace does not map the user id
    os._exit(99)


def install(setup: Job) -> int:
    """Install the filter for this process and its descendants. Returns the descriptor of the listener, which is notified of refused
    system calls; -1: the kernel provides no listener, but the filter is installed."""
    if call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        os._exit(98)
    for code, flags in ((setup["told"], _NEW_LISTENER), (setup["untold"], 0)):
        # struct sock_fprog: a length and, aligned, the address of the code, which follows the header of the bytes object
        where = id(code) + bytes.__basicsize__ - 1
        program = (len(code) // 8).to_bytes(8, sys.byteorder) + where.to_bytes(8, sys.byteorder)
        fd = call("syscall", setup["seccomp"], _SET_FILTER, flags, program)
        if fd >= 0:
            return fd if flags else -1
    os._exit(97)


def call(name: str, *arguments: int | bytes) -> int:
    """Call a function of the C library."""
    result: int = _ctypes.call_function(_ctypes.dlsym(_ctypes.dlopen(None, 0), name), arguments)  # type: ignore[arg-type]
    return result


def send_fd(control: int, fd: int) -> None:
    import _socket

    sock = _socket.socket(fileno=os.dup(control))
    sock.sendmsg([b"F"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fd.to_bytes(4, sys.byteorder))])
    sock.close()


def read_message(fd: int) -> bytes:
    length = int.from_bytes(read_exactly(fd, _HEADER_BYTES), "little")
    if length > _MAX_JOB:
        os._exit(96)
    return read_exactly(fd, length)


def read_exactly(fd: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        some = os.read(fd, min(count - len(data), 1 << 20))
        if not some:
            os._exit(0)  # the pool has closed the socket
        data += some
    return bytes(data)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
