"""Linux kernel features that confine a process. Every function raises ``OSError`` if the kernel refuses.

Uses the standard library only: ``sandbox_child.py`` imports this file as a plain file, in an interpreter without site-packages.
"""

import ctypes
import os
import platform
import signal
import struct
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x20000000, 0x40000000, 0x2000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
_READ_ONLY = MS_RDONLY | MS_NOSUID | MS_NODEV  # mount_setattr(2) has the same three values
_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SECCOMP_MODE_FILTER = 2
NOBODY = 65534
FIRST_PRIVATE_UID = 2_000_000_000
"""Each sandbox uses a user id of its own above this number, so that RLIMIT_NPROC counts only the processes of that sandbox."""

WORK = "/sandbox"  # the working folder inside the sandbox; contains no Python installation

# System calls to deny, with their numbers on x86_64 and aarch64. Programming exercises need none of them. With them sandboxes have been
# escaped, RLIMIT_AS evaded, programs of the host run, and the driver, which has the same user, slowed down. ``socket`` is denied;
# ``socketpair``, which asyncio needs, is not.
_DENIED = {
    "socket": (41, 198), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "shmget": (29, 194), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "execve": (59, 221), "execveat": (322, 281),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT64 = (56, 220), 435, (302, 261)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, argument: int = 0) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), f"prctl({option})")


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (``grpo.system`` has the same function; this file cannot import it)."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _checked(result, f"mount {target}")


def _architecture() -> tuple[int, int]:
    if platform.machine() not in _ARCHITECTURES or sys.maxsize < 2**32:
        raise OSError(0, f"no table of system calls for {platform.machine()}")
    return _ARCHITECTURES[platform.machine()]


def drop_user(uid: int) -> None:
    """Change from root to an unprivileged user without groups, for good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(uid, uid, uid)


def enter_namespaces(uid: int) -> None:
    """Give the children that are forked from now on process, network, IPC and host name namespaces of their own.

    Root creates them directly and changes its user after the file tree is set up. Other users, and root without the capability for
    that, create a user namespace too, in which they keep their id.
    """
    _unshare_namespaces(CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS, uid)
    for change in (_libc.sethostname, _libc.setdomainname):  # the new namespace begins with the names of the host
        _checked(change(b"sandbox", 7), "sethostname")


def _unshare_namespaces(flags: int, uid: int) -> None:
    if os.geteuid() == 0:
        try:
            return unshare(flags)
        except PermissionError:
            drop_user(uid)
            prctl(PR_SET_DUMPABLE, 1)  # otherwise /proc/self belongs to root, and the files below cannot be written
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return None


def _library_folders() -> list[str]:
    """The folders that a Python process reads: its standard library and the system's shared libraries."""
    folders = [os.path.dirname(os.__file__), os.path.join(sys.base_exec_prefix, "lib")]
    folders += ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    chosen: list[str] = []
    for folder in sorted({os.path.normpath(f) for f in folders if os.path.isdir(f)}):
        if not any(folder.startswith(parent + "/") for parent in chosen if not os.path.islink(parent)):
            chosen.append(folder)
    return chosen


def _make_read_only(folder: str, flags: int = _READ_ONLY) -> None:
    """Make the mount ``folder`` and every mount below it read-only. Mounts of the host below a library folder were bound with it."""
    attributes = struct.pack("=4Q", flags, 0, 0, 0)
    if _libc.syscall(_MOUNT_SETATTR, AT_FDCWD, folder.encode(), AT_RECURSIVE, attributes, len(attributes)) == 0:
        return
    with open("/proc/self/mountinfo") as file:  # Linux before 5.12: one mount at a time
        mounts = [line.split()[4] for line in file]
    for path in mounts:
        if (path + "/").startswith(folder + "/"):
            # In a user namespace, flags that the mount already has are locked and must be set again.
            present = os.statvfs(path).f_flag
            kept = present & (MS_NOSUID | MS_NODEV | MS_NOEXEC | 1024 | 2048) | ((1 << 21) if present & 4096 else 0)
            mount("none", path, flags=MS_REMOUNT | MS_BIND | flags | kept)


def enter_private_root(root: str, uid: int, disk_mb: int) -> None:
    """Make the empty folder ``root`` the root of a private file tree: read-only libraries, four devices and a small :data:`WORK`.

    Only the mount namespace of this process changes; on the host, ``root`` stays empty.
    """
    index, _ = _architecture()
    unshare(CLONE_NEWNS)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=4k,mode=755")
    for folder in _library_folders():
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), root + folder)
            continue
        os.makedirs(root + folder, 0o755, exist_ok=True)
        mount(folder, root + folder, flags=MS_BIND | MS_REC)
        _make_read_only(root + folder)
    for file in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/etc/ld.so.cache"):
        if os.path.exists(file):
            os.makedirs(os.path.dirname(root + file), 0o755, exist_ok=True)
            os.close(os.open(root + file, os.O_CREAT, 0o644))
            mount(file, root + file, flags=MS_BIND)
            _make_read_only(root + file, MS_RDONLY | MS_NOSUID)
    os.mkdir(root + WORK)
    if not os.path.lexists(root + "/tmp"):  # it exists if this Python is installed below /tmp
        os.symlink(WORK, root + "/tmp")
    mount("tmpfs", root + WORK, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, f"size={disk_mb}m,nr_inodes=1k,mode=700")
    if os.geteuid() == 0:
        os.chown(root + WORK, uid, NOBODY)
    mount("none", root, flags=MS_REMOUNT | MS_BIND | _READ_ONLY)
    os.chdir(root)
    _checked(_libc.syscall((155, 41)[index], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount the host's files")
    os.chdir("/")


def drop_capabilities() -> None:
    """Drop all capabilities for good, and forbid other processes of the same user to trace this one."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # there is no such capability, or this process may not drop any: capset below drops all that it has
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _checked(_libc.capset(header, struct.pack("=6I", 0, 0, 0, 0, 0, 0)), "capset")
    prctl(PR_SET_DUMPABLE, 0)


def deny_system_calls() -> None:
    """Install a seccomp filter for this process and its children: the system calls in ``_DENIED`` fail with EPERM."""
    index, architecture = _architecture()
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050001, 0x00050026  # ALLOW, ERRNO | EPERM, ERRNO | ENOSYS
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, refuse), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # system calls of the x32 ABI
    for numbers in _DENIED.values():
        program += [(equal, 0, 1, numbers[index]), (give, 0, 0, refuse)]
    # The filter cannot read the flags of clone3, which lie behind a pointer. With ENOSYS, libc falls back to clone.
    program += [(equal, 0, 1, _CLONE3), (give, 0, 0, unknown)]
    namespaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER
    namespaces |= CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWCGROUP
    program += [(equal, 0, 3, _CLONE[index]), (load, 0, 0, 16), (any_bit, 0, 1, namespaces), (give, 0, 0, refuse)]
    # The limits of the process itself (0) may be changed, those of another, such as the driver, not.
    program += [(load, 0, 0, 0), (equal, 0, 3, _PRLIMIT64[index]), (load, 0, 0, 16)]
    program += [(equal, 1, 0, 0), (give, 0, 0, refuse), (give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _checked(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filters, 0, 0), "seccomp")
