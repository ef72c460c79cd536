"""The seccomp filter of untrusted programs: which system calls it refuses (pure). pool.py sends it to main.py, which installs it.

The filter refuses
- calls that isolation depends on (mounts, namespaces, keys, tracing),
- access to the network,
- memory that no limit counts: memfd, System V segments, shared anonymous memory (it stays where no process maps it any more), huge
  pages (a mapping of 4 kB keeps 2 MB), larger buffers of sockets and pipes, pages of files in them (sendfile, splice), inotify's
  queues, contexts of asynchronous I/O,
- changes to the limits or the priority of the watching process,
- everything newer than this list: system calls from number 424 on have the same number on all architectures, and only the named
  ones pass.

A refused call fails with "not permitted". A newer one fails with "not implemented", as do the calls that copy between files and
pipes or sockets: programs then copy in another way. With `told`, the listener is notified of the calls that are not permitted. A
call through the interface of another architecture kills the process.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping

# name -> number on x86-64 and on newer architectures (aarch64); None: no such call
_REFUSED: Mapping[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "userfaultfd": (323, 282),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "nfsservctl": (180, 42),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "seccomp": (317, 277),
    "socket": (41, 198),  # except for AF_UNIX
    "setsockopt": (54, 208),  # refused only if it sets the size of a send buffer
    "fcntl": (72, 25),  # refused only if it sets the size of a pipe
    "mmap": (9, 222),  # refused only for shared anonymous memory
    # refused only if it changes whether the process gets huge pages, which main.py has switched off
    "prctl": (157, 167),
    "clone": (56, 220),  # refused only if it creates a user namespace
    "prlimit64": (302, 261),  # from here to ioprio_set: refused only if the call is for another process
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "ioctl": (16, 29),  # refused only if it types characters into a terminal
}
# These calls put pages of files or of memory into pipes and sockets, which count the bytes only: one byte can hold a page
_MISSING: Mapping[str, tuple[int, int]] = {"sendfile": (40, 71), "splice": (275, 76), "vmsplice": (278, 75)}
_FIRST_OF_ALL = 424  # from here on the numbers are the same on all architectures
_NEWER_THAT_PASS = {434: "pidfd_open", 436: "close_range", 437: "openat2", 439: "faccessat2", 441: "epoll_pwait2"} | {
    449: "futex_waitv",
    452: "fchmodat2",
}
_AF_UNIX = 1
_SOL_SOCKET, _SO_SNDBUF, _SO_SNDBUFFORCE = 1, 7, 32
_F_SETPIPE_SZ = 1031
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_PR_SET_THP_DISABLE = 41
_CLONE_NEWUSER = 0x10000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_X32 = 0x40000000

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of _REFUSED, AUDIT_ARCH
SECCOMP_NUMBERS = {"x86_64": 317, "aarch64": 277}

_KILL_PROCESS, _USER_NOTIF, _ERRNO, _ALLOW = 0x80000000, 0x7FC00000, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; arguments have 8 bytes, the low half first


class NoFilter(RuntimeError):
    """This module has no list of system calls for this machine's architecture."""


def call_name(number: int, argument: int) -> str:
    """Name of a refused call, for people."""
    column, _ = _machine()
    for name, numbers in _REFUSED.items():
        if numbers[column] == number:
            return f"socket (family {argument})" if name == "socket" else name
    return f"system call {number}"


def build_filter(*, told: bool) -> bytes:
    """The filter as struct sock_filter[]. told: refused calls go to the listener, which makes them fail; else the kernel does."""
    column, arch = _machine()
    refuse = _USER_NOTIF if told else _ERRNO | errno.EPERM
    code = [
        _op(_LOAD, _ARCH),
        *_unless(_EQUAL, arch, _op(_RETURN, _KILL_PROCESS)),
        _op(_LOAD, _NR),
    ]
    if column == 0:  # x32, the other system call interface of x86-64, has its own numbers
        code += _when(_AT_LEAST, _X32, _op(_RETURN, _KILL_PROCESS))
    number = {name: numbers[column] for name, numbers in _REFUSED.items() if numbers[column] is not None}
    code += _on(number.pop("socket"), _argument_unless(0, _AF_UNIX, refuse))
    send_buffer = (_SO_SNDBUF, _SO_SNDBUFFORCE)
    resizing = [op for option in send_buffer for op in _when(_EQUAL, option, _op(_RETURN, refuse))]
    level = [_argument(1), *_unless(_EQUAL, _SOL_SOCKET, _allow())]
    code += _on(number.pop("setsockopt"), [*level, _argument(2), *resizing, _allow()])
    code += _on(number.pop("fcntl"), [_argument(1), *_when(_EQUAL, _F_SETPIPE_SZ, _op(_RETURN, refuse)), _allow()])
    kinds = [op for bit in (_MAP_SHARED, _MAP_ANONYMOUS) for op in _unless(_ANY_BIT, bit, _allow())]
    code += _on(number.pop("mmap"), [_argument(3), *kinds, _op(_RETURN, refuse)])
    huge_pages = _when(_EQUAL, _PR_SET_THP_DISABLE, _op(_RETURN, refuse))
    code += _on(number.pop("prctl"), [_argument(0), *huge_pages, _allow()])
    code += _on(number.pop("clone"), [_argument(0), *_when(_ANY_BIT, _CLONE_NEWUSER, _op(_RETURN, refuse)), _allow()])
    for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
        code += _on(number.pop(name), _argument_unless(0, 0, refuse))
    for name in ("setpriority", "ioprio_set"):
        # PRIO_PROCESS is 0, IOPRIO_WHO_PROCESS 1; the second argument is the process
        which = 0 if name == "setpriority" else 1
        only_me = [_argument(0), *_unless(_EQUAL, which, _op(_RETURN, refuse)), *_argument_unless(1, 0, refuse)]
        code += _on(number.pop(name), only_me)
    terminal = [_op(_RETURN, refuse)]
    code += _on(
        number.pop("ioctl"),
        [_argument(1), *_when(_EQUAL, _TIOCSTI, *terminal), *_when(_EQUAL, _TIOCLINUX, *terminal), _allow()],
    )
    for refused in number.values():
        code += _when(_EQUAL, refused or 0, _op(_RETURN, refuse))
    not_implemented = _op(_RETURN, _ERRNO | errno.ENOSYS)
    for numbers in _MISSING.values():
        code += _when(_EQUAL, numbers[column], not_implemented)
    for newer in _NEWER_THAT_PASS:
        code += _when(_EQUAL, newer, _allow())
    # ENOSYS instead of EPERM: the C library then uses an older call. Needed for clone3, whose flags a filter cannot see.
    code += _when(_AT_LEAST, _FIRST_OF_ALL, not_implemented)
    code.append(_allow())
    return b"".join(code)


def _machine() -> tuple[int, int]:
    name = platform.machine()
    if name not in _MACHINES:
        raise NoFilter(f"no seccomp filter for the architecture {name}; supported: {', '.join(_MACHINES)}")
    return _MACHINES[name]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _allow() -> bytes:
    return _op(_RETURN, _ALLOW)


def _argument(index: int) -> bytes:
    """Load the low half of an argument. These arguments are ints, and the kernel ignores their high half."""
    return _op(_LOAD, _ARGUMENT + 8 * index)


def _when(test: int, value: int, *then: bytes) -> list[bytes]:
    return [_op(test, value, 0, len(then)), *then]


def _unless(test: int, value: int, *then: bytes) -> list[bytes]:
    return [_op(test, value, len(then), 0), *then]


def _on(number: int | None, then: list[bytes]) -> list[bytes]:
    """Code for one system call. `then` ends with a return, so for other calls the loaded value is still the call number."""
    assert number is not None
    return _when(_EQUAL, number, *then)


def _argument_unless(index: int, value: int, refuse: int) -> list[bytes]:
    return [_argument(index), *_unless(_EQUAL, value, _op(_RETURN, refuse)), _allow()]
