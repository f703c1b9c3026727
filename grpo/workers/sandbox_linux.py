"""Linux kernel features that confine a process: namespaces, mounts, users, capabilities, seccomp.

``sandbox_driver.py`` calls :func:`enter_namespaces`, :func:`drop_user`, :func:`drop_capabilities`
and :func:`deny_system_calls`, in this order. Each raises ``OSError`` if the kernel refuses. The
driver imports this file as a plain file, in an interpreter without site-packages.
"""

import ctypes
import os
import re
import signal
import sys

# Numbers of the kernel, from sched.h, mount.h and prctl.h. Python 3.11 has none of them.
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
_NEW_NAMESPACES = 0x6C020000
"""Process, network, IPC, host name and mount namespaces."""
_ANY_NAMESPACE = 0x7E020000
"""The flags of ``clone`` for all kinds of namespaces."""
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

NOBODY = 65534
"""User and group that own no files."""
# Set when this file is imported, which is before enter_namespaces() forks: afterwards the driver of
# every sandbox has the process id 1. If several sandboxes had the same user, RLIMIT_NPROC would
# count their processes together, and code could start too few.
_SANDBOX_USER = 2_000_000_000 + os.getpid()
"""Id of a user for this sandbox alone."""
WORK_FOLDER = "/sandbox"
"""The working folder inside the sandbox. It contains no Python installation."""

# The system calls that are denied to the driver and the tests: names, and numbers on x86_64 and
# aarch64. Programming exercises need none of them. The first row is no system call, but the number
# by which seccomp knows the machine's architecture.
_DENIED_SYSTEM_CALLS = """
architecture        0xC000003E  0xC00000B7

# The filter treats these three apart: clone and prlimit64 are denied for some arguments, clone3
# always.
clone               56          220
clone3              435         435
prlimit64           302         261

# Connections. socketpair, which asyncio needs, is not denied.
socket              41          198

# New namespaces and other file trees. A user namespace gives capabilities inside it, with which
# sandboxes were escaped.
unshare             272         97
setns               308         268
mount               165         40
umount2             166         39
pivot_root          155         41
chroot              161         51
open_tree           428         428
move_mount          429         429
fsopen              430         430
fsconfig            431         431
fsmount             432         432
fspick              433         433
mount_setattr       442         442

# Memory and files of other processes: the driver has the same user.
ptrace              101         117
process_vm_readv    310         270
process_vm_writev   311         271
pidfd_getfd         438         438
kcmp                312         272

# Parts of the kernel that sandboxes were escaped through.
add_key             248         217
request_key         249         218
keyctl              250         219
bpf                 321         280
perf_event_open     298         241
userfaultfd         323         282
io_uring_setup      425         425
io_uring_enter      426         426
io_uring_register   427         427

# Memory that RLIMIT_AS does not count, and objects that outlive their process.
shmget              29          194
memfd_create        319         279
memfd_secret        447         447
msgget              68          186
semget              64          190
mq_open             240         180

# Programs of the machine.
execve              59          221
execveat            322         281

# Slowing the driver down.
setpriority         141         140
ioprio_set          251         30
sched_setparam      142         118
sched_setscheduler  144         119
sched_setaffinity   203         122
sched_setattr       314         274
"""

_libc = ctypes.CDLL(None, use_errno=True)


def _uint64s(*values: int) -> ctypes.Array:
    """Return a structure for the kernel, as 64-bit numbers."""
    return (ctypes.c_uint64 * len(values))(*values)


def _call_libc(function: str, *arguments: int | bytes | ctypes.Array) -> None:
    """Call a function of libc; ``OSError`` if it fails."""
    if _libc[function](*arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), function)


def prctl(option: int, argument: int) -> None:
    _call_libc("prctl", option, argument, 0, 0, 0)


def unshare(flags: int) -> None:
    _call_libc("unshare", flags)


def mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    _call_libc("mount", source.encode(), target.encode(), kind.encode(), flags, data.encode())


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends.

    A fork and a change of user undo this, so it is called again after each of them.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _write_proc_self(name: str, text: str) -> None:
    with open("/proc/self/" + name, "w") as file:
        file.write(text)


def enter_namespaces(disk_mb: int) -> None:
    """Continue as process 1 of new namespaces, with a file tree of its own.

    The process that was here before, the launcher, waits for it and ends with it. Root creates the
    namespaces directly and changes its user after the file tree is set up. Other users, and root
    without the capability for that, create a user namespace too, in which they keep their id.
    """
    # Without a process namespace, orphans become children of this process, which can find them.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    end_with_parent()

    # Process namespace: code in the sandbox sees no process of the machine and cannot signal one.
    # Network namespace: no interface. The others: no shared memory, and no name of the machine.
    try:
        unshare(_NEW_NAMESPACES)
    except PermissionError:
        drop_user()
        # Otherwise /proc/self belongs to root, and the files below cannot be written.
        prctl(PR_SET_DUMPABLE, 1)
        # The new namespace knows no ids until these are written.
        uid_map = f"{os.geteuid()} {os.geteuid()} 1"
        gid_map = f"{os.getegid()} {os.getegid()} 1"
        unshare(CLONE_NEWUSER | _NEW_NAMESPACES)
        # The kernel wants setgroups denied before an unprivileged user may map a group.
        _write_proc_self("setgroups", "deny")
        _write_proc_self("uid_map", uid_map)
        _write_proc_self("gid_map", gid_map)

    # A new process namespace begins with the next child, which becomes its process 1. The child
    # goes on below.
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    end_with_parent()

    _enter_private_root(disk_mb)


def drop_user() -> None:
    """Change from root to an unprivileged user without groups, for good."""
    if os.geteuid() == 0:
        os.setgroups([])
        # For root, these set the real, the effective and the saved id.
        os.setgid(NOBODY)
        try:
            os.setuid(_SANDBOX_USER)
        except OSError:
            # In a container, root may be able to use few other user ids.
            os.setuid(NOBODY)
        end_with_parent()


def _add_mount_flags(folder: str, flags: int) -> None:
    """Add flags to the mount ``folder`` and to those below it, which were bound with it."""
    # mount_setattr(AT_FDCWD, folder, AT_RECURSIVE, {set, clear, propagation, user namespace}). It
    # exists since Linux 5.12, and not every libc has it. Its flags have the values of mount's.
    _call_libc("syscall", 442, -100, folder.encode(), 0x8000, _uint64s(flags, 0, 0, 0), 32)


def _enter_private_root(disk_mb: int) -> None:
    """Change to a private file tree: read-only libraries, four devices, a small working folder.

    The tree is mounted over ``/sys`` in a mount namespace of this process: nothing changes or is
    left on the machine itself.
    """
    # If the machine runs out of memory, the kernel ends the sandbox before the trainer.
    _write_proc_self("oom_score_adj", "1000")
    # Otherwise the mounts below would be copied to the machine's mount namespace.
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    root = "/sys"
    # The trainer's umask may hide new folders from the user of the sandbox.
    os.umask(0o022)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=4k,mode=755")

    folders = [
        "/usr/lib",
        "/usr/lib64",
        "/lib",
        "/lib64",
        f"{sys.base_exec_prefix}/lib",
        os.path.dirname(os.__file__),
    ]
    files = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/etc/ld.so.cache"]
    for path in map(os.path.normpath, folders + files):
        target = root + path
        # The path may lie in a folder that is bound already, or not exist on this machine.
        if os.path.lexists(target) or not os.path.exists(path):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        make = os.mknod if path in files else os.mkdir
        make(target)
        mount(path, target, flags=MS_BIND | MS_REC)
        # No devices but those four: a folder of the machine may hold others.
        if path not in files:
            _add_mount_flags(target, MS_NODEV)
    # /tmp exists if this Python is installed below it.
    if not os.path.lexists(root + "/tmp"):
        os.symlink(WORK_FOLDER, root + "/tmp")

    # All that is mounted so far becomes read-only. Only then comes the one folder to write to.
    os.mkdir(root + WORK_FOLDER)
    _add_mount_flags(root, MS_RDONLY | MS_NOSUID)
    options = f"size={disk_mb}m,nr_inodes=1k,mode=777"
    mount("tmpfs", root + WORK_FOLDER, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)

    # pivot_root leaves the old tree over the new one. Unmounting it (MNT_DETACH) leaves no way to
    # the files of the machine.
    os.chdir(root)
    _call_libc("pivot_root", b".", b".")
    _call_libc("umount2", b".", 2)
    os.chdir(WORK_FOLDER)


def drop_capabilities() -> None:
    """Drop all capabilities for good, and forbid processes of the same user to trace this one."""
    # Afterwards no program, such as one with setuid, can give any back.
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # The header is _LINUX_CAPABILITY_VERSION_3 and, in its upper half, this process (0). The 24
    # zero bytes are three empty sets: effective, permitted, inheritable.
    _call_libc("capset", _uint64s(0x20080522), bytes(24))
    prctl(PR_SET_DUMPABLE, 0)


def deny_system_calls() -> None:
    """Install a seccomp filter for this process and its children: denied calls fail with EPERM."""
    rows = re.findall(r"^(\w+) +(\w+) +(\w+)$", _DENIED_SYSTEM_CALLS, re.MULTILINE)
    column = ("name", "x86_64", "aarch64").index(os.uname().machine)
    numbers = {row[0]: int(row[column], 0) for row in rows}

    # An instruction has 64 bits: a value (32), how many instructions to skip if a comparison is
    # false (8) and if it is true (8), and the operation (16). The value is compared with the number
    # loaded last. Where an `if_...` does not hold, the next instruction is skipped, or the next 4.
    load_architecture = 0x00000004_00000020
    load_number = 0x00000000_00000020
    load_argument = 0x00000010_00000020
    if_equal = 0x01_00_0015
    if_equal_else_skip_4 = 0x04_00_0015
    if_not_equal = 0x00_01_0015
    if_at_least = 0x01_00_0035
    if_any_bit = 0x01_00_0045
    allow = 0x7FFF0000_00000006
    fail_with_eperm = 0x00050001_00000006
    fail_with_enosys = 0x00050026_00000006

    program = [
        # Another architecture and the x32 ABI have other numbers, by which a program could get
        # around the table.
        load_architecture,
        numbers["architecture"] << 32 | if_not_equal,
        fail_with_eperm,
        load_number,
        0x40000000 << 32 | if_at_least,
        fail_with_eperm,
        # A fork and a new thread are allowed, a new namespace is not.
        numbers["clone"] << 32 | if_equal_else_skip_4,
        load_argument,
        _ANY_NAMESPACE << 32 | if_any_bit,
        fail_with_eperm,
        allow,
        # The flags of clone3 lie behind a pointer, which a filter cannot read. With ENOSYS, libc
        # falls back to clone.
        numbers["clone3"] << 32 | if_equal,
        fail_with_enosys,
        # A process may change its own limits (process 0), but not those of another, such as the
        # driver.
        numbers["prlimit64"] << 32 | if_equal_else_skip_4,
        load_argument,
        1 << 32 | if_at_least,
        fail_with_eperm,
        allow,
    ]
    for number in numbers.values():
        program += [number << 32 | if_equal, fail_with_eperm]
    program.append(allow)

    code = _uint64s(*program)
    # prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, {length, address})
    _call_libc("prctl", 22, 2, _uint64s(len(program), ctypes.addressof(code)), 0, 0)
