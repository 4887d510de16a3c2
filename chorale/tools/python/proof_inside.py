# ruff: noqa
# mypy: ignore-errors
"""Sent into a sandbox as a cell after ``FACTS = {...}``; never imported. Prints {"broken": [...]}.

Runs with any Python since 3.8 and its standard library, also without ctypes and sockets.
"""

import json
import os
import sys

broken = []


def refused(what, attempt):
    """Records an attempt that does not fail."""
    try:
        attempt()
    except (OSError, ImportError, AttributeError, ValueError, OverflowError):
        return
    broken.append(what)


def create(path):
    with open(path, "x"):
        pass
    os.unlink(path)


def connect():
    import socket

    socket.create_connection(("127.0.0.1", FACTS["port"]), 1).close()


def make_namespace():
    import ctypes

    if ctypes.CDLL(None).unshare(0x10000000) != 0:
        raise OSError


def fill():
    path = "/mnt/data/" + FACTS["unique"]
    try:
        with open(path, "wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, FACTS["disk_bytes"] + 4096)
            else:
                file.truncate(FACTS["disk_bytes"] + 4096)
    finally:
        os.unlink(path)


def writable_settings():
    for place in ("sys", "irq", "bus", "fs", "acpi", "scsi", "sysrq-trigger"):
        if os.path.isfile("/proc/" + place) and os.access("/proc/" + place, os.W_OK):
            yield "/proc/" + place
        for folder, _, names in os.walk("/proc/" + place):
            for name in names:
                if os.access(os.path.join(folder, name), os.W_OK):
                    yield os.path.join(folder, name)


def status(name):
    """Returns a field of this process's status, or None if it is not available."""
    try:
        lines = open("/proc/self/status").read().splitlines()
    except OSError:
        return None
    return next((line.split()[1] for line in lines if line.startswith(name + ":")), None)


refused("a file of the server's machine can be read", lambda: open(FACTS["secret_file"]))
for folder in ("/", "/etc/", "/usr/", "/dev/", "/sys/", "/proc/"):
    refused("a file can be created in " + folder, lambda: create(folder + FACTS["unique"]))
settings = sorted(writable_settings())
if settings:
    broken.append("%d settings of the kernel can be written, %s among them" % (len(settings), settings[0]))
if FACTS["port"] is not None:
    refused("a port of the server's machine can be reached", connect)
seen = sorted(set(os.environ) & set(FACTS["names"]))
if seen:
    broken.append("variables of the server's environment are visible: " + ", ".join(seen[:3]))
if hasattr(os, "kill") and FACTS["pid"] > 1000:
    refused("a process of the server is visible", lambda: os.kill(FACTS["pid"], 0))
if hasattr(os, "setuid"):
    refused("the code can become root", lambda: os.setuid(0))
refused("the code can create a user namespace", make_namespace)
refused("files in /mnt/data have no size limit", fill)
if hasattr(os, "statvfs"):
    for place in ("/tmp", "/mnt/data", "/dev/shm"):
        if os.path.isdir(place) and os.access(place, os.W_OK):
            found = os.statvfs(place)
            if found.f_blocks * found.f_frsize > FACTS["disk_bytes"] + 2**20:
                broken.append(place + " has no limit")
for name in ("CapEff", "CapPrm", "CapBnd"):
    if int(status(name) or "0", 16):
        broken.append("the code has capabilities (" + name + ")")
if status("NoNewPrivs") == "0":
    broken.append("a program can gain privileges when it is started")
if FACTS["call_filter"] and status("Seccomp") == "0":
    broken.append("there is no system-call filter")
print(json.dumps({"broken": broken}))
