"""The program that ``sandbox`` starts: limits itself, then becomes a Python that runs its input.

It imports nothing of halftune. Arguments: seconds of CPU time, MiB of address space, bytes of output.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import struct
import sys
from contextlib import suppress

# Numbers of Linux's sched.h, prctl.h, mount.h and landlock.h, and of its system calls.
_NEW_USER, _NEW_PID, _NEW_NET, _NEW_MOUNTS = 0x10000000, 0x20000000, 0x40000000, 0x20000
_DIE_WITH_PARENT, _DUMPABLE, _NO_NEW_RIGHTS = 1, 4, 38
_PRIVATE, _NO_SET_ID_NO_DEVICES, _HERE, _RECURSIVE = 0x44000, 6, -100, 0x8000
_MOUNT_SETATTR, _RULESET, _ADD_RULE, _RESTRICT = 442, 444, 445, 446
_WRITES = {1: 0x1FF2, 2: 0x3FF2, 3: 0x7FF2}  # by version of Landlock: all rights but to execute and to read
_READ_FILE, _READ_FOLDER = 4, 8
# What Python and its packages read, beside their own folders: libraries, time zones, the machine's description.
_READABLE = ("/usr", "/lib", "/lib64", "/bin", "/nix/store", "/gnu/store", "/proc", "/sys/devices/system")
_READABLE += ("/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf", "/dev/urandom", "/dev/zero")
_SCOPES = 0b11  # from version 6: sockets without a path, and signals, reach processes of the program only
_NOBODY, _PROCESSES, _OWN_FILES = 65534, 64, b"size=64m,nr_inodes=4096,mode=700"


def main() -> None:
    """Limits, isolation, then the code, which the interpreter reads from its input."""
    seconds, memory, output = float(sys.argv[1]), int(sys.argv[2]) << 20, int(sys.argv[3])
    limits = {
        resource.RLIMIT_CPU: max(1, math.ceil(seconds)),
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: output,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if _isolate(libc) and _kernel() >= (5, 14):
            limits[resource.RLIMIT_NPROC] = _PROCESSES  # elsewhere all of the user's processes count
        _give_up_rights(libc)
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value))
        except (OSError, ValueError):  # macOS does not limit the address space
            continue
    os.execv(sys.executable, [sys.executable, "-I", "-B", "-"])


def _kernel() -> tuple[int, ...]:
    """Linux's version: two numbers."""
    first, second = os.uname().release.split(".")[:2]
    return int(first), int("".join(one for one in second if one.isdigit()) or 0)


def _isolate(libc: ctypes.CDLL) -> bool:
    """No network, only its own folder to write to, and a process namespace whose processes all end with its first one.

    False where namespaces are not allowed, as in many containers. The code runs as the second process: the first one is
    out of its reach, and ends with the program that started it.
    """
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | _NEW_PID | _NEW_NET | _NEW_MOUNTS):
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        with suppress(OSError), open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _own_folder(libc)
    if first := os.fork():
        _end_as(first)
    libc.prctl(_DIE_WITH_PARENT, 9)
    if second := os.fork():
        libc.prctl(_DUMPABLE, 0)
        _end_as(second)
    libc.mount(b"proc", b"/proc", b"proc", _NO_SET_ID_NO_DEVICES, None)  # its own processes; not in all containers
    return True


def _end_as(child: int) -> None:
    """Waits for a child, ends as it does."""
    ended = 0
    while ended != child:
        ended, status = os.wait()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _own_folder(libc: ctypes.CDLL) -> None:
    """Everything becomes read-only, but for the working folder, which is now a small one in memory."""
    folder = os.getcwd()
    libc.mount(None, b"/", None, _PRIVATE, None)
    read_only = struct.pack("QQQQ", 1, 0, 0, 0)
    libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, read_only, ctypes.c_size_t(len(read_only)))
    if not libc.mount(b"own", os.fsencode(folder), b"tmpfs", _NO_SET_ID_NO_DEVICES, _OWN_FILES):
        os.chdir(folder)


def _give_up_rights(libc: ctypes.CDLL) -> None:
    """No rights of the namespace's owner; out of reach are other processes, and files outside of the working folder but
    for reading Python's own and the system's.

    Each where the kernel has it. The kernel ends this process before others where memory runs out.
    """
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    libc.prctl(_NO_NEW_RIGHTS, 1, 0, 0, 0)
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    version = libc.syscall(_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    writes = _WRITES[min(version, 3)]
    reads = _READ_FILE | _READ_FOLDER
    handled = struct.pack("QQQ", writes | reads, 0, _SCOPES)[: 24 if version >= 6 else 8]
    rules = libc.syscall(_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    readable = {*_READABLE, sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path}
    wanted = [(".", writes | reads), (os.devnull, 2 | _READ_FILE)]
    wanted += [(path, reads if os.path.isdir(path) else _READ_FILE) for path in readable if os.path.exists(path)]
    for path, allowed in wanted:
        opened = os.open(path, os.O_PATH)
        libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", allowed, opened), 0)
        os.close(opened)
    libc.syscall(_RESTRICT, rules, 0)
    os.close(rules)


if __name__ == "__main__":
    main()
