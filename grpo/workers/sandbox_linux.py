"""Linux kernel features that confine a process.

Every function raises ``OSError`` if the kernel refuses. ``sandbox_child.py`` imports this file as a
plain file, in an interpreter without site-packages.
"""

import ctypes
import os
import re
import signal
import sys

# Numbers of the kernel, from sched.h, mount.h and prctl.h. Python has some of them, since 3.12.
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
_NAMESPACES = 0x6C020000
"""Process, network, IPC, host name and mount namespaces."""
_ALL_NAMESPACES = 0x7E020000
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
WORK = "/sandbox"
"""The working folder inside the sandbox. It contains no Python installation."""

# The system calls that are denied to the driver and the tests: names, and numbers on x86_64 and
# aarch64. Programming exercises need none of them. The first row is no system call, but the number
# that seccomp has for the machine.
_SYSTEM_CALLS = """
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

# Programs of the host.
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


def _words(*values: int) -> ctypes.Array:
    """A structure for the kernel, as 64-bit numbers."""
    return (ctypes.c_uint64 * len(values))(*values)


def _call(function: str, *arguments: int | bytes | ctypes.Array) -> None:
    """Call a function of libc; ``OSError`` if it fails."""
    if _libc[function](*arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), function)


def prctl(option: int, argument: int) -> None:
    _call("prctl", option, argument, 0, 0, 0)


def unshare(flags: int) -> None:
    _call("unshare", flags)


def mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), flags, data.encode())


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends.

    A fork and a change of user clear this.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _write(name: str, text: str) -> None:
    with open("/proc/self/" + name, "w") as file:
        file.write(text)


def enter_namespaces(disk_mb: int) -> None:
    """Continue as process 1 of new namespaces, with a file tree of its own.

    The process before waits for it. Root creates them directly and changes its user after the file
    tree is set up. Other users, and root without the capability for that, create a user namespace
    too, in which they keep their id.
    """
    # Without a process namespace, orphans become children of this process, which can find them.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    end_with_parent()

    # Process namespace: code in the sandbox sees no process of the host and cannot signal one.
    # Network namespace: it has no interface. The others: no shared memory and no name of the host.
    try:
        unshare(_NAMESPACES)
    except PermissionError:
        drop_user()
        # Otherwise /proc/self belongs to root, and the files below cannot be written.
        prctl(PR_SET_DUMPABLE, 1)
        # The new namespace knows no ids until these are written.
        uid_map = f"{os.geteuid()} {os.geteuid()} 1"
        gid_map = f"{os.getegid()} {os.getegid()} 1"
        unshare(CLONE_NEWUSER | _NAMESPACES)
        # The kernel wants setgroups denied before an unprivileged user may map a group.
        _write("setgroups", "deny")
        _write("uid_map", uid_map)
        _write("gid_map", gid_map)

    # The first child is the first process in the new process namespace.
    if first := os.fork():
        os.waitpid(first, 0)
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
            # A user of this sandbox alone, as RLIMIT_NPROC counts the processes of a user.
            os.setuid(2_000_000_000 + os.getpid())
        except OSError:
            # In a container, root may be able to use few other user ids.
            os.setuid(NOBODY)
        end_with_parent()


def _restrict(folder: str, flags: int) -> None:
    """Add flags to the mount ``folder`` and to those below it, which were bound with it."""
    # mount_setattr(AT_FDCWD, folder, AT_RECURSIVE, {set, clear, propagation, user namespace}),
    # since Linux 5.12: not every libc has it. Its flags have the values of mount.
    _call("syscall", 442, -100, folder.encode(), 0x8000, _words(flags, 0, 0, 0), 32)


def _enter_private_root(disk_mb: int) -> None:
    """Change to a private file tree: read-only libraries, four devices and a small :data:`WORK`.

    It is mounted over ``/sys`` in a mount namespace of this process: nothing changes or is left on
    the host.
    """
    # Without memory, the kernel ends the sandbox before the trainer.
    _write("oom_score_adj", "1000")
    # No mount below is copied to the host's namespace.
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
        # It may lie in a folder that is bound, or not exist on this machine.
        if os.path.lexists(target) or not os.path.exists(path):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        make = os.mknod if path in files else os.mkdir
        make(target)
        mount(path, target, flags=MS_BIND | MS_REC)
        # No device but the four, wherever the host has more.
        if path not in files:
            _restrict(target, MS_NODEV)
    # It exists if this Python is installed below /tmp.
    if not os.path.lexists(root + "/tmp"):
        os.symlink(WORK, root + "/tmp")

    # All that is mounted so far becomes read-only. Only then comes the one folder to write to.
    os.mkdir(root + WORK)
    _restrict(root, MS_RDONLY | MS_NOSUID)
    options = f"size={disk_mb}m,nr_inodes=1k,mode=777"
    mount("tmpfs", root + WORK, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)

    # Afterwards the old tree lies over the new one. Unmounting it (MNT_DETACH) leaves no way to the
    # files of the host.
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", 2)
    os.chdir(WORK)


def drop_capabilities() -> None:
    """Drop all capabilities for good, and forbid processes of the same user to trace this one."""
    # No program, setuid or with capabilities of its own, can give any back.
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # The header is _LINUX_CAPABILITY_VERSION_3 and, in its upper half, this process (0). The sets
    # are empty.
    _call("capset", _words(0x20080522), bytes(24))
    prctl(PR_SET_DUMPABLE, 0)


def deny_system_calls() -> None:
    """Install a seccomp filter for this process and its children: denied calls fail with EPERM."""
    column = ("x86_64", "aarch64").index(os.uname().machine)
    rows = re.findall(r"^(\w+) +(\w+) +(\w+)$", _SYSTEM_CALLS, re.MULTILINE)
    numbers = {name: int(columns[column], 0) for name, *columns in rows}

    # An instruction has 64 bits: a value (32), how many instructions to skip if a comparison is
    # false (8) and if it is true (8), and the operation (16). The number loaded last is compared.
    load_architecture = 0x00000004_00000020
    load_number = 0x00000000_00000020
    load_argument = 0x00000010_00000020
    equal = 0x01_00_0015
    equal_else_skip_4 = 0x04_00_0015
    not_equal = 0x00_01_0015
    at_least = 0x01_00_0035
    any_bit = 0x01_00_0045
    allow = 0x7FFF0000_00000006
    refuse = 0x00050001_00000006
    unknown = 0x00050026_00000006

    program = [
        # Another architecture and the x32 ABI have other numbers, by which a program could get
        # around the table.
        load_architecture,
        numbers["architecture"] << 32 | not_equal,
        refuse,
        load_number,
        0x40000000 << 32 | at_least,
        refuse,
        # A fork and a new thread are allowed, a new namespace is not.
        numbers["clone"] << 32 | equal_else_skip_4,
        load_argument,
        _ALL_NAMESPACES << 32 | any_bit,
        refuse,
        allow,
        # The flags of clone3 lie behind a pointer, which a filter cannot read. With ENOSYS, libc
        # falls back to clone.
        numbers["clone3"] << 32 | equal,
        unknown,
        # The limits of the process itself (0) may be changed, those of another, such as the driver,
        # not.
        numbers["prlimit64"] << 32 | equal_else_skip_4,
        load_argument,
        1 << 32 | at_least,
        refuse,
        allow,
    ]
    for number in numbers.values():
        program += [number << 32 | equal, refuse]
    program.append(allow)

    code = _words(*program)
    # prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, {length, address})
    _call("prctl", 22, 2, _words(len(program), ctypes.addressof(code)), 0, 0)
