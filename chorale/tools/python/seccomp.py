"""System-call filters of the sandboxes: classic BPF programs for x86-64 and arm64.

Assembled here because no wheel contains libseccomp, and little of it would be needed. A refused call returns
EPERM, an ordinary error for the code inside.
"""

from __future__ import annotations

import platform
import struct
import sys

# name: (x86-64, arm64). Calls that affect the kernel beyond files, memory and processes of the sandbox, and
# those whose memory escapes the limits (memfd_create and System V shared memory).
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "chroot": (161, 51),
    "clock_adjtime": (305, 266), "clock_settime": (227, 112), "create_module": (174, None),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "finit_module": (313, 273),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "get_mempolicy": (239, 236), "init_module": (175, 105), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "ioperm": (173, None), "iopl": (172, None),
    "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "lookup_dcookie": (212, 18), "mbind": (237, 235), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "move_pages": (279, 239), "mq_open": (240, 180), "msgget": (68, 186), "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "perf_event_open": (298, 241), "personality": (135, 92), "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41), "process_madvise": (440, 440), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "reboot": (169, 142), "remap_file_pages": (216, 234), "request_key": (249, 218), "semget": (64, 190),
    "set_mempolicy": (238, 237), "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268),
    "settimeofday": (164, 170), "shmget": (29, 194), "swapoff": (168, 225), "swapon": (167, 224),
    "sysfs": (139, None), "syslog": (103, 116), "sysctl": (156, None), "umount2": (166, 39),
    "unshare": (272, 97), "userfaultfd": (323, 282), "uselib": (134, None), "ustat": (136, None),
    "vhangup": (153, 58), "vmsplice": (278, 75),
}  # fmt: skip
# All calls that a WebAssembly runtime needs once its code is loaded and its pipes are open.
_ENOUGH_FOR_WASM: dict[str, tuple[int | None, int | None]] = {
    "brk": (12, 214), "clock_getres": (229, 114), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115),
    "close": (3, 57), "exit": (60, 93), "exit_group": (231, 94), "fstat": (5, 80), "futex": (202, 98),
    "getpid": (39, 172), "getppid": (110, 173), "getrandom": (318, 278), "getrusage": (98, 165),
    "gettid": (186, 178), "gettimeofday": (96, 169), "madvise": (28, 233), "membarrier": (324, 283),
    "mmap": (9, 222), "mprotect": (10, 226), "mremap": (25, 216), "munmap": (11, 215), "nanosleep": (35, 101),
    "poll": (7, None), "ppoll": (271, 73), "pselect6": (270, 72), "read": (0, 63), "readv": (19, 65),
    "restart_syscall": (219, 128), "rseq": (334, 293), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124), "select": (23, None), "set_robust_list": (273, 99), "sigaltstack": (131, 132),
    "sysinfo": (99, 179), "time": (201, None), "write": (1, 64), "writev": (20, 66),
}  # fmt: skip
_SOCKET, _CLONE, _CLONE3, _IOCTL = (41, 198), (56, 220), (435, 435), (16, 29)
_LAST_KNOWN = 462  # newer calls return ENOSYS, as if the kernel did not have them
_X32_BIT = 0x4000_0000
_NEW_NAMESPACES = 0x7E02_0080  # every CLONE_NEW* flag
_FAMILIES = (1, 16, 2, 10)  # local, netlink (for the list of interfaces); with a network, IPv4 and IPv6
_SETSOCKOPT, _SOL_SOCKET = (54, 208), 1
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and both with FORCE: unlimited kernel memory
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into a terminal
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF_0000, 0x0005_0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_MACHINES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _load_argument(number: int) -> bytes:
    """Loads the low half of an argument, on little-endian machines."""
    return _op(_LOAD, _ARGUMENTS + 8 * number)


def _start() -> tuple[int, bytes] | None:
    """Returns this machine's column and the beginning of a program, or None on an unknown architecture.

    It refuses calls of another architecture, including 32-bit x86, and loads the call number.
    """
    if sys.platform != "linux" or struct.calcsize("P") != 8 or platform.machine() not in _MACHINES:
        return None
    column, architecture = _MACHINES[platform.machine()]
    program = _op(_LOAD, _ARCHITECTURE) + _op(_EQUAL, architecture, 1, 0) + _op(_RETURN, _ERROR | _EPERM)
    program += _op(_LOAD, _NUMBER)
    if column == 0:
        program += _op(_AT_LEAST, _X32_BIT, 0, 1) + _op(_RETURN, _ERROR | _EPERM)
    return column, program


def _when(number: int, *body: bytes) -> bytes:
    """Applies ``body`` to one call. The body must return or reload the number."""
    inside = b"".join(body)
    return _op(_EQUAL, number, 0, len(inside) // 8) + inside


def deny_list(*, network: bool = True) -> bytes | None:
    """Returns the filter for programs in namespaces, or None on an unknown architecture."""
    start = _start()
    if start is None:
        return None
    column, program = start
    again, refuse = _op(_LOAD, _NUMBER), _op(_RETURN, _ERROR | _EPERM)
    program += _op(_AT_LEAST, _LAST_KNOWN + 1, 0, 1) + _op(_RETURN, _ERROR | _ENOSYS)
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += _when(number, refuse)
    # A filter cannot read the flags of clone3, which are in memory. With ENOSYS, programs fall back to clone.
    program += _when(_CLONE3[column], _op(_RETURN, _ERROR | _ENOSYS))
    program += _when(_CLONE[column], _load_argument(0), _op(_ANY_BIT, _NEW_NAMESPACES, 0, 1), refuse, again)
    allowed = _FAMILIES if network else _FAMILIES[:2]
    families = [_op(_EQUAL, f, len(allowed) - n, 0) for n, f in enumerate(allowed)]
    program += _when(
        _SOCKET[column], _load_argument(0), *families, _op(_RETURN, _ERROR | _EAFNOSUPPORT), again
    )
    sizes = [_op(_EQUAL, option, 0, 1) + refuse for option in _BUFFER_SIZES]
    at_socket = _load_argument(1) + _op(_EQUAL, _SOL_SOCKET, 0, 1 + 2 * len(sizes)) + _load_argument(2)
    program += _when(_SETSOCKOPT[column], at_socket, *sizes, again)
    typing = [_op(_EQUAL, request, 0, 1) + refuse for request in _TERMINAL_INPUT]
    program += _when(_IOCTL[column], _load_argument(1), *typing, again)
    return program + _op(_RETURN, _ALLOW)


def allow_list() -> bytes | None:
    """Returns the filter of a WebAssembly runtime: open pipes, memory and time only."""
    start = _start()
    if start is None:
        return None
    column, program = start
    for numbers in _ENOUGH_FOR_WASM.values():
        if (number := numbers[column]) is not None:
            program += _when(number, _op(_RETURN, _ALLOW))
    return program + _op(_RETURN, _ERROR | _EPERM)
