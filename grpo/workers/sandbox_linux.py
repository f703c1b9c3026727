"""Linux kernel features that confine a process. Every function raises ``OSError`` if the kernel refuses.

``sandbox_child.py`` imports this file as a plain file, in an interpreter without site-packages.
"""

import ctypes
import os
import signal
import struct
import sys

CLONE_NEWNS, CLONE_NEWUSER, _PID_NET_IPC_UTS, _ALL_NAMESPACES = 0x20000, 0x10000000, 0x6C000000, 0x7E020000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
_READ_ONLY = MS_RDONLY | MS_NOSUID | MS_NODEV  # mount_setattr(2) has the same three values
_MOUNT_SETATTR = 442  # since Linux 5.12
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
NOBODY = 65534
_OWN_USER = 2_000_000_000 + os.getpid()  # of this sandbox alone, as RLIMIT_NPROC counts the processes of a user
WORK = "/sandbox"
"""The working folder inside the sandbox. It contains no Python installation."""

# System calls to deny, with their numbers on x86_64 and aarch64. Programming exercises need none of them. With them
# sandboxes have been escaped, RLIMIT_AS evaded, programs of the host run, and the driver, which has the same user,
# slowed down. ``socket`` is denied; ``socketpair``, which asyncio needs, is not.
_DENIED = {
    "socket": (41, 198), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "shmget": (29, 194),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "execve": (59, 221), "execveat": (322, 281), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
}  # fmt: skip
_ARCHITECTURES = {("x86_64", 8): (0, 0xC000003E), ("aarch64", 8): (1, 0xC00000B7)}
"""Machine and size of a pointer -> index in the pairs above, and the machine's name in seccomp."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: int | bytes) -> None:
    """Call a function of libc; ``OSError`` if it fails."""
    if getattr(_libc, function)(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def prctl(option: int, argument: int = 0) -> None:
    _call("prctl", option, argument, 0, 0, 0)


def unshare(flags: int) -> None:
    _call("unshare", flags)


def mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), flags, data.encode())


def _architecture() -> tuple[int, int]:
    return _ARCHITECTURES[os.uname().machine, struct.calcsize("P")]


def enter_namespaces() -> None:
    """Continue as process 1 of new process, network, IPC and host name namespaces. The process before waits for it.

    Root creates them directly and changes its user after the file tree is set up. Other users, and root without the
    capability for that, create a user namespace too, in which they keep their id.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # without a process namespace, orphans become children of this process
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    identity = {}
    try:
        unshare(_PID_NET_IPC_UTS)
    except PermissionError:
        drop_user()
        prctl(PR_SET_DUMPABLE, 1)  # otherwise /proc/self belongs to root, and the files below cannot be written
        user, group = os.geteuid(), os.getegid()
        identity = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        unshare(CLONE_NEWUSER | _PID_NET_IPC_UTS)
    if first := os.fork():
        try:
            os.waitpid(first, 0)
        finally:
            os._exit(0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name, text in identity.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    for function in ("sethostname", "setdomainname"):  # the new namespace begins with the names of the host
        _call(function, b"sandbox", 7)


def drop_user() -> None:
    """Change from root to an unprivileged user without groups, for good. The process ends with its parent."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        try:
            os.setresuid(_OWN_USER, _OWN_USER, _OWN_USER)
        except OSError:  # in a container, root may be able to use few other user ids
            os.setresuid(NOBODY, NOBODY, NOBODY)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it


def _make_read_only(folder: str, flags: int = _READ_ONLY) -> None:
    """Make the mount ``folder`` and every mount below it read-only: mounts of the host were bound with the folder."""
    at_fdcwd, at_recursive, attributes = -100, 0x8000, struct.pack("=4Q", flags, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, at_fdcwd, folder.encode(), at_recursive, attributes, len(attributes))


def enter_private_root(disk_mb: int) -> None:
    """Change to a private file tree: read-only libraries, four devices and a small :data:`WORK`.

    It is mounted over ``/sys`` in a mount namespace of this process: nothing changes or is left on the host.
    """
    if os.getpid() != 1:
        raise OSError("it needs a process namespace")
    # Without memory, the kernel ends the sandbox before the trainer.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    unshare(CLONE_NEWNS)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    root = "/sys"
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=4k,mode=755")
    os.umask(0o022)
    folders = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", f"{sys.base_exec_prefix}/lib", os.path.dirname(os.__file__)]
    files = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/etc/ld.so.cache"]
    for path in map(os.path.normpath, folders + files):
        target = root + path
        if os.path.lexists(target) or not os.path.exists(path):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        (os.mknod if path in files else os.mkdir)(target)
        mount(path, target, flags=MS_BIND | MS_REC)
        _make_read_only(target, MS_RDONLY | MS_NOSUID if path in files else _READ_ONLY)
    os.mkdir(root + WORK)
    mount("tmpfs", root + WORK, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, f"size={disk_mb}m,nr_inodes=1k,mode=777")
    if not os.path.lexists(root + "/tmp"):  # it exists if this Python is installed below /tmp
        os.symlink(WORK, root + "/tmp")
    mount("none", root, flags=MS_REMOUNT | MS_BIND | _READ_ONLY)
    os.chdir(root)
    _call("syscall", _DENIED["pivot_root"][_architecture()[0]], b".", b".")
    _call("umount2", b".", 2)  # MNT_DETACH: the files of the host
    os.chdir(WORK)


def drop_capabilities() -> None:
    """Drop all capabilities for good, and forbid other processes of the same user to trace this one."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):  # no error if there is no such capability, or if this process may not drop any
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    _call("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))  # _LINUX_CAPABILITY_VERSION_3, this process
    prctl(PR_SET_DUMPABLE, 0)


def deny_system_calls() -> None:
    """Install a seccomp filter for this process and its children: the system calls in ``_DENIED`` fail with EPERM."""
    index, architecture = _architecture()
    clone, clone3, prlimit64 = (56, 220)[index], 435, (302, 261)[index]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050001, 0x00050026  # ALLOW, ERRNO | EPERM, ERRNO | ENOSYS
    denied = [((equal, 0, 1, numbers[index]), (give, 0, 0, refuse)) for numbers in _DENIED.values()]
    program = [
        (load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, refuse),
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, refuse),  # system calls of the x32 ABI
        *[instruction for pair in denied for instruction in pair],
        # The filter cannot read the flags of clone3, which lie behind a pointer. With ENOSYS, libc falls back to clone.
        (equal, 0, 1, clone3), (give, 0, 0, unknown),
        (equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, _ALL_NAMESPACES), (give, 0, 0, refuse),
        # The limits of the process itself (0) may be changed, those of another, such as the driver, not.
        (load, 0, 0, 0), (equal, 0, 3, prlimit64), (load, 0, 0, 16), (equal, 1, 0, 0), (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    _call("prctl", PR_SET_SECCOMP, 2, filters, 0, 0)  # SECCOMP_MODE_FILTER
