"""Linux kernel features that confine a process: namespaces, mounts, users, capabilities, seccomp.

``sandbox_driver.py`` calls :func:`enter_namespaces`, :func:`drop_user`, :func:`drop_capabilities`
and :func:`deny_system_calls`, in this order. Each raises ``OSError`` if the kernel refuses.
:func:`deny_system_calls` raises ``KeyError`` on a machine that is neither x86_64 nor aarch64.

The driver imports this file by its folder, without the package ``grpo``, which needs site-packages.
So :func:`end_with_parent` is here once more, although ``grpo.system`` has it.
"""

import ctypes
import os
import re
import signal
import sys

# Numbers of the kernel, from sched.h, mount.h and prctl.h. Python 3.11 has none of them. A number
# that is used once stands where it is used, with its kernel name in a comment.
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
_NEW_NAMESPACES = (
    CLONE_NEWNS  # mounts
    | 0x4000000  # CLONE_NEWUTS: name of the machine
    | 0x8000000  # CLONE_NEWIPC: shared memory and queues
    | 0x20000000  # CLONE_NEWPID: processes
    | 0x40000000  # CLONE_NEWNET: network
)
"""The namespaces that each sandbox has for itself."""
_ANY_NAMESPACE = (
    _NEW_NAMESPACES
    | CLONE_NEWUSER
    | 0x2000000  # CLONE_NEWCGROUP
)  # fmt: skip
"""Flags of ``clone`` for all namespaces that it can create. Time namespaces are not among them:
only ``unshare`` and ``clone3`` create these, and both are denied."""
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 0x40000
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

NOBODY = 65534
"""Id of a user, and of a group, that own no files."""
# Set when this file is imported, which is before enter_namespaces() forks: afterwards the driver of
# every sandbox has the process id 1. If several sandboxes had the same user, RLIMIT_NPROC would
# count their processes together, and code could start too few.
_SANDBOX_USER = 2_000_000_000 + os.getpid()
"""Id of a user that no other sandbox has, except in another container: process ids are unique
within a container."""
WORK_FOLDER = "/sandbox"
"""Working folder inside the sandbox. It is mounted over this path, which would hide a Python that
is installed there: no machine has one there."""

# The system calls that are denied to the driver and the tests: names, and numbers on x86_64 and
# aarch64. Programming exercises need none of them. A list of the allowed calls would be stricter,
# but Python and libc use different calls in each version, and the layers above already take away
# files, network and processes. The first row is no system call, but the number by which seccomp
# knows the machine's architecture.
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

# Starting programs of the machine.
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
    """Return 64-bit numbers one after the other in memory, as a structure for the kernel."""
    return (ctypes.c_uint64 * len(values))(*values)


def _call_libc(function: str, *arguments: int | bytes | ctypes.Array) -> None:
    """Call a function of libc. Raises ``OSError`` if it fails."""
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
    """Fork, and return only in the child: as process 1 of new namespaces, with a private file tree.

    The calling process, the launcher, stays in this function. It waits for the child and then
    exits. There are three cases:

    - Root creates the namespaces directly, and changes its user later (:func:`drop_user`).
    - Other users create a user namespace too, in which they keep their id.
    - Root without the capability ``CAP_SYS_ADMIN`` needs a user namespace as well. It first becomes
      the sandbox user, because inside of the namespace it could not become another user.
    """
    # If unshare fails below, this process becomes the driver. As a subreaper it adopts the orphans
    # of a test, so that _kill_everything() finds them.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    end_with_parent()

    # Five namespaces. Processes: code in the sandbox sees no process of the machine and cannot
    # signal one. Mounts: a file tree of its own. Network: no interface. IPC: no shared memory and
    # no queues of the machine. UTS: the name of the machine can be read, but not changed.
    try:
        unshare(_NEW_NAMESPACES)
    except PermissionError:
        drop_user()
        # The change of the user clears this flag. Without the flag, the files of /proc/self belong
        # to root, and this user could not write them below.
        prctl(PR_SET_DUMPABLE, 1)
        # The ids are read before unshare. After it, until the maps are written, all ids read as
        # NOBODY.
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
    """Change from root to an unprivileged user without groups, for good.

    Other users stay as they are: they have no right to change.
    """
    if os.geteuid() == 0:
        os.setgroups([])
        # Called by root, setgid and setuid set the real, the effective and the saved id.
        os.setgid(NOBODY)
        try:
            os.setuid(_SANDBOX_USER)
        except OSError:
            # In a container, root may be able to use few other user ids.
            os.setuid(NOBODY)
        end_with_parent()


def _add_mount_flags(folder: str, flags: int) -> None:
    """Add flags to the mount ``folder`` and to all mounts below it."""
    # Not every libc has mount_setattr, which exists since Linux 5.12. These flags have the same
    # values as for mount.
    _call_libc(
        "syscall",
        442,  # SYS_mount_setattr
        -100,  # AT_FDCWD, which is not used for an absolute path
        folder.encode(),
        0x8000,  # AT_RECURSIVE
        _uint64s(flags, 0, 0, 0),  # flags to set, flags to clear, propagation, user namespace
        32,  # size in bytes of these four numbers
    )


def _enter_private_root(disk_mb: int) -> None:
    """Change to a private file tree: read-only libraries, the dynamic linker's cache, four devices,
    and a small working folder.

    The tree is mounted over ``/sys`` in a mount namespace of this process: nothing changes or is
    left on the machine itself. ``/sys`` exists on every machine, and the sandbox needs none of its
    files.
    """
    # 1000 is the highest score: if the machine runs out of memory, the kernel ends the sandbox
    # first, not the trainer.
    _write_proc_self("oom_score_adj", "1000")
    # Otherwise the mounts below would be copied to the machine's mount namespace.
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    root = "/sys"
    # The trainer's umask may hide new folders from the user of the sandbox.
    os.umask(0o022)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=4k,mode=755")

    # The libraries of the system and of this Python, since code imports modules in the sandbox.
    folders = [
        "/usr/lib",
        "/usr/lib64",
        "/lib",
        "/lib64",
        f"{sys.base_exec_prefix}/lib",
        os.path.dirname(os.__file__),
    ]
    # ld.so.cache lists where the dynamic linker finds libraries.
    files = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/etc/ld.so.cache"]
    for path in map(os.path.normpath, folders + files):
        target = root + path
        # The path may lie in a folder that is bound already, or not exist on this machine.
        if os.path.lexists(target) or not os.path.exists(path):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        # A mount point must exist. mknod makes an empty regular file, by its default mode.
        make = os.mknod if path in files else os.mkdir
        make(target)
        mount(path, target, flags=MS_BIND | MS_REC)
        # A folder of the machine may hold devices, too. Only the four above may be used.
        if path not in files:
            _add_mount_flags(target, MS_NODEV)
    # Many programs write to /tmp. It exists already if this Python is installed below it.
    if not os.path.lexists(root + "/tmp"):
        os.symlink(WORK_FOLDER, root + "/tmp")

    # All that is mounted so far becomes read-only. Only then comes the one folder to write to.
    os.mkdir(root + WORK_FOLDER)
    _add_mount_flags(root, MS_RDONLY | MS_NOSUID)
    options = f"size={disk_mb}m,nr_inodes=1k,mode=777"
    mount("tmpfs", root + WORK_FOLDER, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)

    # pivot_root leaves the machine's file tree mounted over the new one. After umount2 there is no
    # way to the files of the machine.
    os.chdir(root)
    _call_libc("pivot_root", b".", b".")
    _call_libc("umount2", b".", 2)  # MNT_DETACH: also while files there are open
    os.chdir(WORK_FOLDER)


def drop_capabilities() -> None:
    """Drop all capabilities for good, and forbid processes of the same user to trace this one."""
    # Afterwards no program can gain capabilities when it is started, not even one with setuid.
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # The header is _LINUX_CAPABILITY_VERSION_3 and, in its upper half, this process (0). The 24
    # zero bytes are three empty sets: effective, permitted, inheritable.
    _call_libc("capset", _uint64s(0x20080522), bytes(24))
    prctl(PR_SET_DUMPABLE, 0)


def deny_system_calls() -> None:
    """Install a seccomp filter for this process and its children: denied calls fail with EPERM."""
    rows = re.findall(r"^(\w+) +(\w+) +(\w+)$", _DENIED_SYSTEM_CALLS, re.MULTILINE)
    column = {"x86_64": 1, "aarch64": 2}[os.uname().machine]
    numbers = {row[0]: int(row[column], 0) for row in rows}
    architecture = numbers.pop("architecture")

    # The filter is a program of 64-bit instructions. From the highest bits on, an instruction has
    # - 32 bits: a value, which `if_...` compares with the number that was loaded last,
    # - 8 bits: how many instructions are skipped if the comparison is false,
    # - 8 bits: how many are skipped if it is true,
    # - 16 bits: the operation.
    # The rule of the names: if `if_...` holds, the next instruction is run. If it does not hold,
    # the next instruction is skipped, or the next 4. In Python, `value << 32 | if_equal` means
    # `(value << 32) | if_equal`, which puts the value into the instruction.

    # BPF_LD | BPF_W | BPF_ABS: load 32 bits of struct seccomp_data. The value is their offset.
    load_architecture = 0x00000004_00000020
    load_number = 0x00000000_00000020
    load_first_argument = 0x00000010_00000020  # its lower half
    # BPF_JMP | BPF_K, with one of three comparisons.
    if_equal = 0x01_00_0015  # BPF_JEQ
    if_equal_else_skip_4 = 0x04_00_0015  # BPF_JEQ
    if_not_equal = 0x00_01_0015  # BPF_JEQ, which skips if it is true
    if_at_least = 0x01_00_0035  # BPF_JGE
    if_any_bit = 0x01_00_0045  # BPF_JSET
    # BPF_RET | BPF_K: end the program. The value is the decision.
    allow = 0x7FFF0000_00000006  # SECCOMP_RET_ALLOW
    fail_with_eperm = 0x00050001_00000006  # SECCOMP_RET_ERRNO | EPERM
    fail_with_enosys = 0x00050026_00000006  # SECCOMP_RET_ERRNO | ENOSYS

    program = [
        # Another architecture and the x32 ABI have other numbers, by which a program could get
        # around the table.
        load_architecture,
        architecture << 32 | if_not_equal,
        fail_with_eperm,
        load_number,
        0x40000000 << 32 | if_at_least,  # __X32_SYSCALL_BIT
        fail_with_eperm,
        # A fork and a new thread are allowed, a new namespace is not. load_first_argument
        # overwrites the call number. That is safe: after it, one of two instructions ends the
        # program, here and for prlimit64 below, so that no later instruction needs the number.
        numbers["clone"] << 32 | if_equal_else_skip_4,
        load_first_argument,
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
        load_first_argument,
        1 << 32 | if_at_least,
        fail_with_eperm,
        allow,
    ]
    # clone, clone3 and prlimit64 are among these, but the program has ended for them already.
    for number in numbers.values():
        program += [number << 32 | if_equal, fail_with_eperm]
    program += [allow]

    code = _uint64s(*program)
    _call_libc(
        "prctl",
        22,  # PR_SET_SECCOMP
        2,  # SECCOMP_MODE_FILTER
        _uint64s(len(program), ctypes.addressof(code)),
        0,
        0,
    )
