"""Attempts to get out of a sandbox, or to take more than it gives. Run by ``test_escapes``.

``FORBIDDEN`` must end in an error of the system, and print ``word`` if they succeed; none of them changes the
machine then: they look, ask for access, or make something of a unique name and remove it. ``GREEDY`` must end
by themselves or be ended, within the limits of the session. Capitals are filled in by ``filled``; the value
of the secret is written backwards, so that a traceback that shows the code does not show it.
"""

from __future__ import annotations

_LIBC = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
_CALL = _LIBC + (
    "import platform; column = 0 if platform.machine() == 'x86_64' else 1\n"
    "def call(numbers, *values):\n"
    "    r = libc.syscall(numbers[column], *values)\n"
    "    if r < 0 and ctypes.get_errno() in (1, 13, 38): raise OSError(ctypes.get_errno(), 'refused')\n"
    "    if r < 0: raise OSError(ctypes.get_errno(), 'failed')\n"
    "    return r\n"
)
FORBIDDEN: dict[str, str] = {
    # files of the host
    "a file that all may read": "open('SECRET').read()\nprint(word)",
    "passwords": "open('/etc/shadow').read()\nprint(word)",
    "the project's files": "open('PROJECT/pyproject.toml').read()\nprint(word)",
    "memory of the server": "open('/proc/PID/mem', 'rb').read(1)\nprint(word)",
    "environment of the server": "open('/proc/PID/environ', 'rb').read(1)\nprint(word)",
    "environment": "import os\nif any('VALUE'[::-1] in v for v in os.environ.values()): print(word)\n1 / 0",
    "environment of other processes": "import glob\nfor p in glob.glob('/proc/[0-9]*/environ'):\n"
    "    try:\n        if b'VALUE'[::-1] in open(p, 'rb').read(): print(word)\n    except OSError: pass\n1 / 0",
    "a symbolic link out": "import os\nos.symlink('SECRET', '/mnt/data/UNIQUE')\n"
    "open('/mnt/data/UNIQUE').read()\nprint(word)",
    "dots out": "open('/mnt/data/../../../../../../../../SECRET').read()\nprint(word)",
    "a folder's descriptor": "import os\nfd = os.open('/', os.O_RDONLY)\n"
    "os.open('../../SECRET', os.O_RDONLY, dir_fd=fd)\nprint(word)",
    "roots of processes": "import os\nfor p in ('self', '1', 'PID'):\n    for link in ('root', 'cwd'):\n"
    "        if os.path.exists('/proc/%s/%s/SECRET' % (p, link)): print(word)\n1 / 0",
    "files left open": "import os, stat\nfor fd in range(3, 64):\n"
    "    try: mode = os.fstat(fd).st_mode\n    except OSError: continue\n"
    "    if stat.S_ISREG(mode) or stat.S_ISSOCK(mode): print(word)\n1 / 0",
    "write to the system": "import os\nfor folder in ('/', '/etc/', '/usr/', '/usr/lib/', '/var/', '/sys/', '/run/'):\n"
    "    try: open(folder + 'UNIQUE', 'x').close(); os.unlink(folder + 'UNIQUE'); print(word)\n"
    "    except OSError: pass\n1 / 0",
    "write to the interpreter": "import os, sys\nfor path in (os.__file__, sys.executable, '/proc/self/exe'):\n"
    "    try:\n        with open(path, 'r+b', 0) as f: old = f.read(1); f.seek(0); f.write(old); print(word)\n"
    "    except OSError: pass\n1 / 0",
    # network, by every family
    "TCP": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)\nprint(word)",
    "TCP over IPv6": "import socket\ns = socket.socket(socket.AF_INET6); s.settimeout(2)\n"
    "s.connect(('::1', PORT6))\nprint(word)",
    "UDP": "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.connect(('127.0.0.1', PORT))\n"
    "s.send(b'x')\ns.settimeout(1)\ns.recv(1)\nprint(word)",
    "the internet": "import socket\nsocket.create_connection(('1.1.1.1', 80), 2)\nprint(word)",
    "names": "import socket\nsocket.getaddrinfo('example.com', 80)\nprint(word)",
    "local sockets": "import socket\nfor path in ('/var/run/docker.sock', '/run/dbus/system_bus_socket', '\\0UNIQUE'):\n"
    "    try: socket.socket(socket.AF_UNIX).connect(path); print(word)\n    except OSError: pass\n1 / 0",
    "raw packets": "import socket\nfor family, kind in ((17, 3), (2, 3), (10, 3)):\n"
    "    try: socket.socket(family, kind); print(word)\n    except (OSError, PermissionError): pass\n1 / 0",
    "other families": "import socket\nfor family in (38, 40, 31, 44, 29, 21):\n"
    "    try: socket.socket(family, socket.SOCK_DGRAM); print(word, family)\n    except OSError: pass\n"
    "    try: socket.socket(family, socket.SOCK_STREAM); print(word, family)\n    except OSError: pass\n"
    "    try: socket.socket(family, socket.SOCK_SEQPACKET); print(word, family)\n    except OSError: pass\n1 / 0",
    "a program that reads": "import subprocess\n"
    "if b'VALUE'[::-1] in subprocess.run(['cat', 'SECRET'], capture_output=True).stdout: print(word)\n1 / 0",
    # the kernel's settings and devices
    "settings of the kernel": "import os\nnum = 0\nfor folder, _, names in os.walk('/proc/sys'):\n"
    "    num += sum(os.access(os.path.join(folder, n), os.W_OK) for n in names)\nif num: print(word, num)\n1 / 0",
    "other places of /proc": "import os\nplaces = ['/proc/sysrq-trigger', '/proc/kcore', '/proc/timer_list']\n"
    "for top in ('irq', 'bus', 'fs', 'acpi', 'scsi', 'driver'):\n"
    "    places += [os.path.join(f, n) for f, _, names in os.walk('/proc/' + top) for n in names]\n"
    "if any(os.access(p, os.W_OK) for p in places): print(word)\n1 / 0",
    "/sys": "import os\nplaces = ['/sys', '/sys/kernel', '/sys/fs/cgroup', '/sys/power/state', '/sys/kernel/uevent_helper']\n"
    "if any(os.access(p, os.W_OK) for p in places): print(word)\n1 / 0",
    "not to be killed": "import os\nos.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000')\nprint(word)",
    "devices": "import os\nfor name in ('mem', 'kmsg', 'kvm', 'fuse', 'vda', 'sda', 'nvme0n1', 'nvidiactl', 'loop-control'):\n"
    "    try: os.open('/dev/' + name, os.O_RDONLY | os.O_NONBLOCK); print(word, name)\n    except OSError: pass\n1 / 0",
    "a new device": "import os, stat\nos.mknod('/mnt/data/UNIQUE-dev', stat.S_IFBLK | 0o600, os.makedev(254, 0))\n"
    "os.unlink('/mnt/data/UNIQUE-dev')\nprint(word)",
    "a file in /dev": "import os\nopen('/dev/UNIQUE', 'x').close()\nos.unlink('/dev/UNIQUE')\nprint(word)",
    # mounts, namespaces, rights
    "mount": _LIBC + "import os; os.mkdir('/mnt/data/UNIQUE-dir')\n"
    "if libc.mount(b'x', b'/mnt/data/UNIQUE-dir', b'tmpfs', 0, None) == 0:\n"
    "    libc.umount2(b'/mnt/data/UNIQUE-dir', 2); print(word)\n1 / 0",
    "the new calls to mount": _CALL + "call((430, 430), b'tmpfs', 0)\nprint(word)",
    "chroot": "import os\nos.chroot('/mnt/data')\nprint(word)",
    "a user namespace": _LIBC + "if libc.unshare(0x10000000) == 0: print(word)\n1 / 0",
    "a process in a namespace": _CALL + "r = call((56, 220), 0x10000000 | 17, 0, 0, 0, 0)\n"
    "if r == 0: os._exit(0)\nprint(word)",
    "another's namespace": _LIBC + "fd = os.open('/proc/1/ns/mnt', os.O_RDONLY)\n"
    "if libc.setns(fd, 0) == 0: print(word)\n1 / 0",
    "root": "import os\nos.setuid(0)\nprint(word)",
    "root's group": "import os\nos.setgroups([0])\nprint(word)",
    "capabilities": "status = open('/proc/self/status').read().split()\n"
    "for name in ('CapEff:', 'CapPrm:', 'CapBnd:'):\n"
    "    if int(status[status.index(name) + 1], 16): print(word)\n1 / 0",
    "programs with more rights": "import os\nstatus = open('/proc/self/status').read().split()\n"
    "if status[status.index('NoNewPrivs:') + 1] != '1': print(word)\n1 / 0",
    "higher priority": "import os\nos.nice(-5)\nprint(word)",
    "real-time priority": "import os\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\nprint(word)",
    "higher limits": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6))\nprint(word)",
    # other processes
    "signals to the server": "import os\nos.kill(PID, 0)\nprint(word)",
    "tracing the server": _CALL + "call((101, 117), 16, PID, 0, 0)\nprint(word)",
    "memory of the server by a call": _CALL + "b = ctypes.create_string_buffer(64)\n"
    "v = (ctypes.c_void_p * 2)(ctypes.addressof(b), 8)\ncall((310, 270), PID, v, 1, v, 1, 0)\nprint(word)",
    "processes of the host": "import os\nif any(int(p) > 1000 for p in os.listdir('/proc') if p.isdigit()): print(word)\n1 / 0",
    # calls of the kernel with a history
    "keyrings": _CALL + "call((250, 219), 0, -3, 0, 0, 0)\nprint(word)",
    "bpf": _CALL + "b = ctypes.create_string_buffer(b'\\1\\0\\0\\0\\4\\0\\0\\0\\4\\0\\0\\0\\1\\0\\0\\0', 128)\n"
    "call((321, 280), 0, b, 128)\nprint(word)",
    "performance events": _CALL + "b = ctypes.create_string_buffer(b'\\1\\0\\0\\0\\x70\\0\\0\\0', 112)\n"
    "call((298, 241), b, 0, -1, -1, 0)\nprint(word)",
    "io_uring": _CALL + "b = ctypes.create_string_buffer(256)\ncall((425, 425), 1, b)\nprint(word)",
    "kernel modules": _CALL + "try: call((175, 105), 0, 0, b'')\n"
    "except OSError as e:\n    if e.errno not in (1, 38): print(word)\n    raise",
    "reboot": _CALL + "try: call((169, 142), 0xfee1dead, 672274793, 0x12345, 0)\n"
    "except OSError as e:\n    if e.errno != 1: print(word)\n    raise",
    "file handles": _CALL + "b = ctypes.create_string_buffer(b'\\x80\\0\\0\\0' + bytes(200))\n"
    "m = ctypes.c_int()\ncall((303, 264), -100, b'/', b, ctypes.byref(m), 0)\nprint(word)",
    "typing into a terminal": "import fcntl, os\nfcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'x')\nprint(word)",
    # the session itself
    "files of another session": "import os\n"
    "if any('OTHER' in name for _, folders, files in os.walk('/') for name in files): print(word)\n1 / 0",
    "native code": _LIBC + "fd = libc.open(b'SECRET', 0)\nif fd >= 0: print(word)\n1 / 0",
    "pickle": "import pickle, os\nif pickle.loads(b\"cposix\\nsystem\\n(S'grep -q secret- SECRET'\\ntR.\") == 0: print(word)\n1 / 0",
    "standard input": "import sys\nif sys.stdin.read(): print(word)\n1 / 0",
}  # fmt: skip

GREEDY: dict[str, str] = {
    "a list": "x = []\nwhile True: x.append(bytes(10**6))",
    "one array": "x = bytearray(2**40)",
    "mapped memory": "import mmap\nx = [mmap.mmap(-1, 2**26) for _ in range(64)]\nfor m in x: m.write(bytes(2**26))\nprint(word)",
    "memory of children": "import os, time\nfor _ in range(16):\n"
    "    if os.fork() == 0:\n        x = bytearray(b'x') * (2**26); time.sleep(30); os._exit(0)\ntime.sleep(30)",
    "tmpfs in /tmp": "for n in range(64): open('/tmp/f%d' % n, 'wb').write(bytes(2**22))\nprint(word)",
    "tmpfs in /mnt/data": "for n in range(64): open('/mnt/data/f%d' % n, 'wb').write(bytes(2**22))\nprint(word)",
    "tmpfs in /dev/shm": "for n in range(8): open('/dev/shm/f%d' % n, 'wb').write(bytes(2**22))\nprint(word)",
    "tmpfs in /dev": "for n in range(8): open('/dev/f%d' % n, 'wb').write(bytes(2**22))\nprint(word)",
    "tmpfs over the session's memory": "for place in ('/tmp', '/mnt/data'):\n"
    "    open(place + '/half', 'wb').write(bytes(7 * 2**20))\nx = [bytes(2**20) for _ in range(1000)]\nprint(word)",
    "files without names": "import os\nfds = [os.memfd_create('x') for _ in range(8)]\n"
    "for fd in fds: os.write(fd, bytes(2**22))\nprint(word)",
    "shared memory of System V": _CALL + "call((29, 194), 0, 2**26, 0o600 | 512)\nprint(word)",
    "a sparse file": "f = open('/mnt/data/s', 'wb'); f.seek(2**40); f.write(b'x'); f.flush()\nprint(word)",
    "many empty files": "for n in range(10**7): open('/mnt/data/e%d' % n, 'w').close()",
    "deep folders": "import os\nfor _ in range(10**5): os.mkdir('d'); os.chdir('d')",
    "processes": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nx = [threading.Thread(target=time.sleep, args=(60,)) for _ in range(500)]\n"
    "for t in x: t.start()\nprint(word)",
    "open files": "x = [open('/mnt/data/f', 'w') for _ in range(10**5)]\nprint(word)",
    "sockets": "import socket\nx = [socket.socketpair() for _ in range(10**5)]\nprint(word)",
    "buffers of sockets": "import os, socket\nfor _ in range(20):\n    if os.fork() == 0: break\nx = []\n"
    "for _ in range(120):\n    a, b = socket.socketpair()\n    x += [a, b]\n    a.setblocking(False)\n"
    "    try:\n        while True: a.send(bytes(65536))\n    except OSError: pass\n"
    "import time\ntime.sleep(60)\nprint(word)",
    "larger buffers of sockets": "import socket\na, b = socket.socketpair()\n"
    "for option in (7, 8, 32, 33):\n    try: a.setsockopt(1, option, 2**24); print(word)\n    except OSError: pass\n1 / 0",
    "an endless loop": "while True: pass",
    "an endless loop in C": "sum(iter(int, 1))",
    "endless output": "while True: print('x' * 1000)",
    "endless output of errors": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "fighting the timer": "import signal\nfor name in ('SIGALRM', 'SIGTERM', 'SIGINT'):\n"
    "    if hasattr(signal, name): signal.signal(getattr(signal, name), signal.SIG_IGN)\n"
    "if hasattr(signal, 'setitimer'): signal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass",
    "swallowing the timer": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "recursion": "def f(): f()\nf()",
    "recursion without a limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "recursion in C": "x = []\nfor _ in range(10**6): x = [x]\nimport pickle\npickle.dumps(x)",
    "nested source": "eval('(' * 10**6 + ')' * 10**6)",
    "big integers": "x = 10**(10**9)\nprint(word)",
    "long texts": "x = 'a' * 10**12\nprint(word)",
    "a bomb of zip": "import zlib\nx = zlib.compress(bytes(2**24))\nx = [zlib.decompress(x) for _ in range(10**4)]\nprint(word)",
    "a bomb of pickle": "import pickle\nx = b'(lp0\\n' + b'(g0\\nlp0\\n' * 10**5\n"
    "a = ['x' * 1000] * 1000\nfor _ in range(30): a = [a] * 10\npickle.loads(pickle.dumps(repr(a)))\nprint(word)",
    "a slow pattern": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')\nprint(word)",
    "a bad pointer": "import ctypes\nctypes.string_at(0)\nprint(word)",
    "abort": "import os\nos.abort()",
    "leaving": "import os\nos._exit(0)",
    "closed pipes": "import os\nfor fd in range(64):\n    try: os.close(fd)\n    except OSError: pass\nwhile True: pass",
    "a forged end": "import os, sys\nframe = sys._getframe()\nwhile frame:\n"
    "    request = frame.f_locals.get('request')\n"
    "    if request: os.write(1, b'\\0' + request['nonce'].encode() + b'k\\0')\n    frame = frame.f_back\n"
    "while True: pass",
    "a stolen request": "import os\nwhile os.read(0, 65536): pass\nwhile True: pass",
    "a process that stays": "import subprocess\nsubprocess.Popen(['sleep', '98765'], start_new_session=True)\nwhile True: pass",
}  # fmt: skip

# Attempts that succeed where nothing holds them: what shows that they are attempts at all.
SUCCEED_UNHELD = (
    "a file that all may read", "the project's files", "dots out", "a symbolic link out", "a folder's descriptor",
    "roots of processes", "TCP", "UDP", "a program that reads", "signals to the server", "processes of the host",
    "native code", "pickle",
)  # fmt: skip


def filled(code: str, facts: dict[str, str]) -> str:
    """The code with the server's facts in it; longer names first, as PORT begins PORT6."""
    for name in sorted(facts, key=len, reverse=True):
        code = code.replace(name, facts[name])
    return "word = 'ESC' + 'APED'\n" + code
